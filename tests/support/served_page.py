"""The page of `top --web`, served to tests."""

import contextlib
import threading

from roxxel_dist.view.items import items_of
from roxxel_dist.view.web.server import Feed, PageServer

LIMIT_S = 60.0


@contextlib.contextmanager
def serve(*names):
    with PageServer(Feed(lambda: items_of([str(name) for name in names]))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join(LIMIT_S)
