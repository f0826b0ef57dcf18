"""What the tests that damage files share."""

import contextlib


@contextlib.contextmanager
def refusing_by_name(folder):
    """Nothing else than a ValueError that names the file may come out."""
    message = str(folder)
    try:
        yield
    except ValueError as error:
        message = str(error)
    assert str(folder) in message
