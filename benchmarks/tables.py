"""The tables of `make bench`: what each asks, who measures it, and what it leaves out."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table, which one program measures."""

    name: str
    """Of its program in this folder, its results and its picture."""
    part: str
    """`make bench-PART` measures it."""
    title: str
    question: str
    words: tuple[str, ...] = ()
    """Of the program's command line, beside --quick and --json."""
    how: str
    """What takes turns with what, and by which clock."""
    quick: str
    """What the short form has less of; empty where there is none, and the table is left as it is."""
    left_out: str
    """What is not measured."""
    misses: str = ""
    """Why targets are missed, as a profile shows it; on the page while a line of the table is missed."""


CACHE = ".cache/benchmarks"
TABLES = (
    Table(
        name="data_read", part="data", title="Reading data", words=(CACHE,),
        question="What does the next shuffled batch cost, against copying the same tokens in order and against other "
        "loaders? How soon does a process have its first batch, and how much memory does it take?",
        how="2^27 random tokens in the page cache. Batches to numpy by CPU time of the calling thread, batches to "
        "eight simulated devices by wall time, because jax copies in threads of its own. \"Order known\" is the same "
        "without the time to find the rows.",
        quick="3 rounds, not 9",
        left_out="Reading from a cold disk or over a network; loaders with worker processes; copies to a GPU or TPU.",
    ),
    Table(
        name="remote_data", part="data", title="Data in a bucket", words=(CACHE,),
        question="Do steps wait for a bucket at 50 ms and 20 MB/s? How soon is the first batch there, far inside a "
        "corpus of 10 TB, and how many bytes are fetched that nobody uses?",
        how="An S3 server on the same machine, behind a proxy that delays each request and shares its rate among all. "
        "A step sleeps. The corpus of 10 TB is a server that answers for ranges of it; what its index would take "
        "longer with real digests is added.",
        quick="200 steps, not 1,000",
        left_out="Clouds and their real networks; mounts such as gcsfuse.",
    ),
    Table(
        name="train_bucket", part="data", title="A run in a bucket", words=(CACHE,),
        question="What does the training loop pay for a run that is kept in a bucket, over one in a folder?",
        how="Blocks of the steps take turns with the same compiled program called in a bare loop, in a run of "
        "each kind with a row every 10 steps and a checkpoint every 50. An S3 server on the same machine.",
        quick="4 turns, not 8",
        left_out="Clouds and their real networks; several processes; large states.",
    ),
    Table(
        name="data_build", part="data", title="Building a corpus",
        question="How much slower is `data build` with a BPE tokenizer than the tokenizer alone?",
        how="Whole processes in turns, on all cores, on the same texts. The build also finds, reads and checks the "
        "files and writes the shards.",
        quick="8 MiB of text, not 24",
        left_out="Parquet and JSON lines; corpora larger than the memory.",
    ),
    Table(
        name="train_loop", part="train", title="The training loop", words=(CACHE,),
        question="What does the loop add to the bare compiled step: in every step, at a phase boundary, for a "
        "checkpoint, at a restart? Is the rate that `find-lr` suggests a good one?",
        how="Blocks of the trainer's steps take turns with the same compiled program called in a bare loop. The main "
        "thread is timed by its own CPU time.",
        quick="half the turns, one restart of each model, one width for `find-lr`",
        left_out="A GPU or TPU (`make bench-gpu` has a program for a GPU); several processes; remote storage.",
        misses="of the main thread's time over the bare step, half is the next batch (half of that is "
        "jax.make_array_from_callback), a sixth is the running digest, and a twelfth the heartbeats; no other part is "
        "larger. The digests of a save take 8 to 18 ms for 240 MB, which is 13 to 30 GB/s: about the speed of the "
        "memory. The copies of the small state are 35 in 1,000 steps of 5 ms, by threads on the two cores that "
        "compute the steps.",
    ),
    Table(
        name="train_mup", part="mup", title="Learning rates of wider models",
        question="By how much does the best learning rate move from dim 32 to dim 256, with the standard "
        "parametrization and with mup?",
        how="Trainings of 150 steps of 16 x 65 tokens at eight rates, each twice the one before, of a model of two "
        "blocks; the rate with the lowest mean loss of the last 20 steps is the best one. One seed.",
        quick="dim 32 to 128, and adamw alone",
        left_out="Larger models, other numbers of steps, deeper models.",
    ),
    Table(
        name="decode", part="model", title="Decoding with a cache",
        question="Does a token cost the same behind a long prompt as behind a short one, and what does the cache save?",
        how="Wall time of many new tokens less that of one, so that reading the prompt does not count.",
        quick="3 rounds, not 5",
        left_out="A GPU or TPU; batches of prompts; other programs that serve models.",
    ),
    Table(
        name="ngram", part="ngram", title="The demo's model against a 3-gram", words=(CACHE,),
        question="Does the model of `make demo` learn more from its tokens than an interpolated Kneser-Ney 3-gram that "
        "counts the very same tokens?",
        how="Both predict the same held-out rows. The CPU time of the training is that of its process.",
        quick="",
        left_out="Larger models and corpora.",
    ),
    Table(
        name="compiled", part="compiled", title="Compiled for accelerators",
        question="Does a device repeat the work of another? How large are the FLOPs of all devices together over those "
        "of one device, on 1 to 256 TPU chips and on 8 and 64 GPUs?",
        how="`roxxel-dist plan --target` compiles the training step with the compiler of the accelerators, and counts "
        "the FLOPs of matrix products and attention in the compiled program. One device: the same step, traced for "
        "one device and not compiled. As many rows as devices, fsdp, scan_layers, gradient_checkpointing, bfloat16.",
        quick="v5e:2x2 and h100:1x8, and the smaller model",
        left_out="Nothing was run on an accelerator, so there is no time of a step. The model of 1.3B parameters on "
        "one v5e chip: its state alone is larger than the memory of the chip. Other programs that compile for a "
        "topology, such as MaxText's train_compile: not installed.",
    ),
    Table(
        name="launch", part="launch", title="Launching: faults, starts and restarts",
        question="How soon is every process of a job gone when something fails? What does the launcher add to a start, "
        "and how soon does a job go on after a restart?",
        how="Real jobs on one machine, and on up to four hosts that are network namespaces with an ssh server each. "
        "Wall time from the fault to the end of the last process, which the kernel tells.",
        quick="3 repetitions, not 10",
        left_out="Hosts of their own, real networks, SLURM, Kubernetes and Ray.",
    ),
    Table(
        name="sweep_driver", part="sweep", title="The driver of a sweep",
        question="What does a trial cost the process that leads a sweep, against Ray Tune's?",
        how="Trials that do nothing and report once. CPU time of the driver's process alone, each driver in a new "
        "process, in turns; the time for suggestions is taken out of ours.",
        quick="1 round of 24 trials, not 3 of 60",
        left_out="Clusters of more than one node.",
    ),
    Table(
        name="sweep_scale", part="sweep", title="A sweep of thousands of trials",
        question="Does the cost of a trial grow with the number of trials, and how soon is a long journal replayed?",
        how="The controller, random search, hyperband, the journal on the disk and the lines for a person; trials are "
        "generators that report at once. CPU time of the process.",
        quick="500 trials, not 5,000",
        left_out="Ray, which `sweep_driver` measures; searches by `bayes`; the report at the end.",
    ),
    Table(
        name="sweep_engines", part="sweep", title="Engines of a search",
        question="Is the best of 50 trials of `bayes` as good as that of other engines, does it keep clear of trials "
        "that fail, does it work with 4 trials at once, and what does a suggestion cost?",
        how="Searches of made surfaces, the same seeds for all engines. The value is that of the trial which reported "
        "the best, without its noise. Medians over the seeds; a peer's own median is the target.",
        quick="4 seeds, not 20, and not the sampler that needs torch",
        left_out="Other search spaces; searches of thousands of trials.",
    ),
    Table(
        name="sweep_mixint", part="sweep", title="Engines on bbob-mixint", words=("--instances", "5", "--all"),
        question="How many searches does `bayes` win against other engines on functions that nobody here has made, "
        "also with 4 trials at once and with a third of the trials failing at random?",
        how="COCO's bbob-mixint: 24 functions of integers and real numbers, in the instances that the line names. "
        "Nothing was developed on instances 5 to 9; 10 to 14 decided between two engines, and 10 to 12 how failures "
        "are weighed. A pair is one function in one dimension and instance, with one seed for both engines; a tie "
        "counts as half.",
        quick="TPE and random alone",
        left_out="What has no line: other instances, SMAC3, and other budgets.",
        misses="in 5 dimensions most lost pairs are of functions with many optima (Katsuura, Gallagher's and "
        "Lunacek's), where chance decides; over instances 5 to 14, 76 % of 240 pairs are won. With a third of the "
        "trials failing, two thirds of the values are left, and the model of failures still finds patterns that are "
        "none: without it 79 % of 72 pairs are won in 20 dimensions (instances 10 to 12), with it 74 %. It stays, "
        "since trials that are too large for the device fail together.",
    ),
    Table(
        name="sweep_steps", part="sweep", title="Schedulers on recorded curves",
        question="How many training steps does a search with a scheduler need to reach the best value of 50 full "
        "trials, and what does a choice cost?",
        how="`roxxel_dist.sweep.replay` on 480 recorded trainings, every point of a grid. A fifth of them was kept "
        "apart when the constants of freeze_thaw were chosen (its part `apart`). Each seed has its own goal. With 4 "
        "workers three of them train beside the leading trial, whose 20 reports come one after the other.",
        quick="2 seeds, not 20",
        left_out="Larger models, longer curves; the time to start a paused trial again.",
        misses="one worker needs about 44 reports, of which 20 are those of the trial that leads, one after the other. "
        "Four workers make 80 reports in that time: 1.8 times as many, if none of them is ever idle.",
    ),
    Table(
        name="sweep_real", part="sweep", title="A real sweep", words=(f"{CACHE}/sweep",),
        question="Does a sweep of twelve short trainings on real text end within 15 minutes of two cores, and does it "
        "find something better than the defaults?",
        how="`roxxel-dist sweep` with `sweeps/demo.yaml`, two trials at once, from nothing to its end; the limit is in "
        "proportion to the number of trials.",
        quick="4 trials, not 12",
        left_out="Larger models; W&B servers; a Ray cluster of several machines.",
    ),
    Table(
        name="sweep_budget", part="sweep", title="Real sweeps with a budget of steps", words=(f"{CACHE}/budget",),
        question="After the same number of training steps, do schedulers that pause trials find a lower loss than full "
        "trials?",
        how="`roxxel-dist sweep --max_steps_total` on real text, two trials at once, as many steps as 12 full trials "
        "of 200 steps have. All sweeps have the sampler `bayes`; they take turns seed by seed.",
        quick="1 seed, not 3",
        left_out="Larger models, longer trials, more workers.",
    ),
)  # fmt: skip
PARTS = tuple(dict.fromkeys(table.part for table in TABLES))
