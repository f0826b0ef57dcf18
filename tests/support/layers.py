"""The order of the rooms of the package, and what may be imported against it."""

from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "roxxel_dist"
# From the top of the house down: a file imports from its own room and from those below it.
RANKS = [
    ["__main__", "trainer", "lora", "sharding"],
    ["cli"],
    ["view"],
    ["sweep"],
    ["audit", "layouts"],
    ["run"],
    ["train"],
    ["weights"],
    ["place"],
    ["settings"],
    ["checkpoint"],
    ["input"],
    ["curriculum"],
    ["model"],
    ["corpus"],
    ["data"],
    ["launcher"],
    ["objects"],
    ["devices"],
    ["cluster"],
    ["process"],
    ["utils"],
]
# Inside a room likewise; FRONT are the files that lie in it and in none of its rooms.
FRONT = ""
INNER = {
    "view": ["web", FRONT],
    "sweep": ["driver", FRONT, "trial", "report", "samplers", "study", "space"],
    "run": ["estimate", FRONT],
    "train": [FRONT, "validation", "exact", "log", "step"],
    "data": [FRONT, "remote", "files", "tokenizer"],
    "launcher": [
        "backends",
        "control",
        "fleet",
        "preflight",
        "transport",
        "agent",
        "host",
        "policy",
        FRONT,
        "job",
    ],
}
# What the launcher knows of `train`, by names.
OF_TRAIN = {
    ("roxxel_dist.launcher.job.spec", "roxxel_dist.cli.train"),
    ("roxxel_dist.launcher.job.spec", "roxxel_dist.run.experiment"),
    ("roxxel_dist.launcher.job.spec", "roxxel_dist.objects.url"),
    ("roxxel_dist.launcher.job.spec", "roxxel_dist.place.directory"),
}
# What comes from above when it is called.
EXCEPTIONS = OF_TRAIN | {
    ("roxxel_dist.data.dataset", "roxxel_dist.input.stream"),  # Roxxel.stream
    ("roxxel_dist.model.transformer", "roxxel_dist.weights.load"),  # Transformer.from_pretrained
    # Tokenizer.load of a SentencePiece model
    ("roxxel_dist.data.tokenizer.tokenizer", "roxxel_dist.data.tokenizer.sentencepiece"),
    # A program that a rank is
    ("roxxel_dist.launcher.job.placement", "roxxel_dist.launcher.host.worker"),
}
# A rank joins the others before the user's program begins.
IN_A_RANK = ("roxxel_dist.launcher.host.worker", "roxxel_dist.cluster.distributed")
# A program of its own on a host.
ON_A_HOST = ("roxxel_dist.launcher.host.host_checks", "roxxel_dist.devices.device_check")
# They know the address of an object from a folder; others ask `place/run_place.py` of a run, `names_objects` of data.
ASK_IS_URL = {
    "roxxel_dist.objects.url",
    "roxxel_dist.launcher.job.spec",
    "roxxel_dist.data.files.discovery",
    "roxxel_dist.place.bucket_folder",
    "roxxel_dist.place.directory",
    "roxxel_dist.place.run_place",
}
