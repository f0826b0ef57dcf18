"""The settings of a training: its optimizer, its length, and what it does at which step."""

import math
from typing import Any, Literal, TypedDict, get_args

from roxxel_dist.model.user_code import is_function, split_name
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.component import component

TRIAL = "ROXXEL_TRIAL"
"""Set to 1 in the trials of a sweep, whose warm-up is cut to half of the run."""
SHARE_COMPILATION = "ROXXEL_SHARE_COMPILATION"
"""Set to 1 where other processes of this machine may need the same programs now; a sweep does."""
WARMUP_FRACTION = 0.05
SCHEDULE_FREE = "schedule_free_adamw"
OptimizerName = Literal["adamw", "nadamw", "adafactor", "lion", "sgd", "muon", "schedule_free_adamw"]
OPTIMIZERS = get_args(OptimizerName)
STABLE_FRACTION = 0.4
"""Of the whole run: how long "wsd" stays at the peak, where `decay_steps` does not say otherwise."""


@component
class OptimizerConfig:
    """The optimizer and its learning rate, whose schedule spans the whole curriculum."""

    optimizer: OptimizerName | str = "adamw"
    """Optimizer: adamw, nadamw, adafactor, lion, sgd with momentum, muon, or schedule_free_adamw. muon uses adamw for
    embeddings, the output head and all parameters that are not matrices; the experts of a block are matrices, each by
    itself. `plan` lists both. lion needs a third to a tenth of the lr of
    adamw, and as many times its weight_decay. schedule_free_adamw takes lr_schedule constant, and evaluates an average
    of the parameters, as ema does. Or your own, "module:function": build(config, learning_rate) returns an
    optax.GradientTransformation for one step, whose rate is the float32[] scalar learning_rate. grad_clip comes before
    it."""
    lr: float = 3e-4
    """Peak learning rate."""
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Learning-rate schedule after the warm-up. cosine, linear: down to lr x 0.01. constant: lr. wsd: lr for 40 % of
    the run, then a cosine down to lr x 0.01."""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """Scaling of the learning rate with the batch. lr is the rate of the largest batch of the curriculum, counted in
    tokens; a resumed run and a fork keep that batch until lr or lr_scaling changes. A step whose batch has a share s of
    these tokens has the rate times s^0.5 (sqrt) or s (linear). none: all batches have the same rate."""
    warmup_steps: int | None = None
    """Steps of linear warm-up. Default: a twentieth of the run; a fork has as many as its trunk."""
    decay_steps: int | None = None
    """With wsd: steps of the decay at the end of the run."""
    weight_decay: float = 0.01
    """Weight decay of matrices, multiplied by the learning rate. Norms and biases have no decay."""
    beta1: float = 0.9
    """Decay of the mean of gradients: adamw, nadamw, lion, and muon's adamw. For schedule_free_adamw: how near to the
    average gradients are taken."""
    beta2: float | None = None
    """Decay of the mean of squared gradients for adamw, nadamw and muon's adamw (default 0.95), and for
    schedule_free_adamw (default 0.999). For lion: decay of its momentum (default 0.99)."""
    momentum: float | None = None
    """Momentum of sgd (default 0.9) and of muon (default 0.95)."""
    grad_clip: float = 1.0
    """Gradient clipping: maximum global norm. 0: no clipping."""

    def __post_init__(self) -> None:
        if is_function(self.optimizer):
            split_name("optimizer", self.optimizer)
        elif self.optimizer not in OPTIMIZERS:
            raise UserError(
                f"optimizer is {self.optimizer!r}: it must be one of {', '.join(OPTIMIZERS)}, or a function of your "
                f'own, "module:function"'
            )
        if self.optimizer == SCHEDULE_FREE:
            self._check_schedule_free()
        if not 0 < self.lr < math.inf:
            raise UserError(f"lr is {self.lr}: it must be above 0, and finite")
        for name in ("warmup_steps", "weight_decay", "grad_clip"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise UserError(f"{name} is {value}: it must be 0 or more, and finite")
        for name in ("beta1", "beta2", "momentum"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise UserError(f"{name} is {value}: it must be at least 0 and below 1")
        if self.decay_steps is not None:
            if self.decay_steps < 1:
                raise UserError(f"decay_steps is {self.decay_steps}: it must be at least 1")
            if self.lr_schedule != "wsd":  # optax calls the whole of a cosine its decay_steps: do not guess
                raise UserError(
                    f"decay_steps is {self.decay_steps}, and lr_schedule is {self.lr_schedule}, which decays until the "
                    f"end: leave decay_steps out, or use lr_schedule wsd"
                )

    def _check_schedule_free(self) -> None:
        if self.lr_schedule != "constant":
            raise UserError(
                f"lr_schedule is {self.lr_schedule}, and optimizer is {self.optimizer}, whose average stands in for a "
                f"decay: set lr_schedule to constant (after the warm-up)"
            )
        if self.beta1 == 0:
            raise UserError(f"beta1 is 0, and optimizer is {self.optimizer}: it must be above 0, such as 0.9")

    def settings(self, total_steps: int) -> dict[str, float]:
        """The numbers of a run of `total_steps`: lr, weight_decay, warmup_steps, total_steps, decay_steps, grad_clip.

        "decay_steps" is the length of the decay, which ends with the run, whatever the schedule. Raises ValueError
        where no steps, a warm-up that leaves none to decay in, or a decay that is too long.
        """
        total, run = total_steps, f"the run's {total_steps} steps"
        if total < 1:
            raise UserError(f"total_steps is {total}: a schedule needs at least 1, so give the curriculum more steps")
        warmup = int(total * WARMUP_FRACTION) if self.warmup_steps is None else self.warmup_steps
        if warmup >= total:
            raise UserError(f"warmup_steps is {warmup}: it must be below {run}, or left out")
        decay = total - warmup
        if self.lr_schedule == "wsd":
            stable = int(total * STABLE_FRACTION)
            if self.decay_steps is None and warmup + stable >= total:
                raise UserError(
                    f"warmup_steps is {warmup}: with {stable} steps of wsd at the peak it leaves none of {run} to "
                    f"decay in; use fewer, or give the length of the decay with decay_steps"
                )
            decay = decay - stable if self.decay_steps is None else self.decay_steps
            if warmup + decay > total:
                raise UserError(
                    f"decay_steps is {decay}: with {warmup} steps of warm-up that is more than {run}; use at most "
                    f"{total - warmup}"
                )
        steps = {"warmup_steps": float(warmup), "total_steps": float(total), "decay_steps": float(decay)}
        return {"lr": self.lr, "weight_decay": self.weight_decay, **steps, "grad_clip": self.grad_clip}


@component
class LoopOptions:
    """Actions of a trainer besides training, and their steps."""

    log_every: int = 10
    """Steps between rows of the log."""
    eval_every: int = 50
    """Steps between validations."""
    eval_iters: int = 10
    """Batches that a validation reads of each data set: the same ones each time, with rows from the whole set. Rows of
    another length are other rows."""
    checkpoint_every: int = 50
    """Steps between checkpoints."""
    memory_checkpoint_every: int | str = "auto"
    """Steps between copies of the state in the shared memory of the host. A restarted job continues from the newest
    copy. auto: as often as costs at most 1 % of the time, if there is memory. 0: no copies. `launch` with restarts
    keeps copies, `train` alone does not."""
    memory_replicas: int | None = None
    """Replicas of those copies on a neighboring host, 0 or 1. With 1, a lost host costs no more steps than a lost
    process. Default: 1 with several hosts. Data that other hosts have anyway is not sent."""
    max_to_keep: int | None = 3
    """Number of newest checkpoints to keep. The checkpoint with the lowest val_loss is also kept."""
    keep_best: bool = False
    """Save a checkpoint after each validation with a lower val_loss, also between the steps of checkpoint_every.
    False: the best checkpoint is the one with the lowest val_loss among those that are saved anyway."""
    keep_every: int | None = None
    """Steps between checkpoints that are never deleted."""
    keep_steps: list[int] | None = None
    """Steps whose checkpoints are saved and never deleted."""
    export_weights: bool = True
    """Write weight files of the best and of the last checkpoint, if they are below 2 GB."""
    max_steps: int | None = None
    """Last step of this run. The learning-rate schedule still spans the complete curriculum."""
    seed: int = 42
    """Random seed of the weights, the data order and dropout."""
    init_from: str | None = None
    """Initial weights: from another run (RUN or RUN@STEP), or from a Hugging Face folder (LLaMA, Mistral, Mixtral,
    Qwen2, Qwen3, OLMo 2, Gemma 2 and 3, SmolLM3, Phi-3). The model has the shape of those weights, and text is encoded
    with their tokenizer. Moments, random streams and the data position are new."""
    val_fraction: float = 0.1
    """Fraction of every shard that is held out for validation: its last part, from the end of a document. It is never
    trained on."""
    patience: int = 0
    """Early stopping: the run ends after this many validations without a lower val_loss. 0: never."""
    verify_data: Literal["on", "off"] = "on"
    """Verify the data: each process compares the tokens that it reads with the checksums of the shards, once, in the
    background. A damaged block, or an id outside of the vocabulary, ends the run; the message names the file and the
    document."""
    on_bad_step: Literal["raise", "skip", "rewind"] = "raise"
    """Reaction to a loss or gradient that is NaN or infinite, or to a loss spike. raise: end the run. skip: do not
    apply the update. rewind: go back to the newest checkpoint known to be good, and skip the rows of
    that step."""
    spike_factor: float = 0.0
    """Loss spike: a loss above this factor of its running mean is a bad step; for a negative mean m above m +
    (factor - 1) |m|. 0: never."""
    max_rewinds: int = 3
    """Maximum number of rewinds. After that a bad step ends the run."""
    ema: float = 0.0
    """Exponential moving average (EMA) of the parameters, with this decay for each step, such as 0.999. It takes the
    place of the parameters in evaluation: val_loss, the best checkpoint and patience are those of the average, and so
    are weight files, export, generate, eval and init_from. Training does not read it. 0: none."""
    use_bf16: bool = False
    """bfloat16 parameters and optimizer moments: half the memory, less precise."""
    bf16_compute: bool = False
    """Mixed precision: computation in bfloat16, with parameters and moments in float32."""
    fsdp: bool = False
    """Fully sharded data parallelism (FSDP): parameters and moments are sharded over devices (see fsdp_devices), not
    replicated."""
    virtual_shards: int = 0
    """Virtual shards of each batch, a power of two. The rows of a phase are a multiple of it, or fewer rows that
    divide it: then each row is cut into virtual shards of its tokens. The run has the same bits on any
    number of devices up to it, in any number of processes, with fsdp or without. 0: none."""
    profile_steps: list[int] | None = None
    """Steps [A, B] to profile. Their trace is written to the run directory."""

    def is_due(self, what: Literal["log", "eval", "checkpoint"], step: int, last_step: int) -> bool:
        """Whether it is done after `step`, counted from 1: the first and the last step of a run are always due.

        A checkpoint is due, too, at the steps whose checkpoints are never deleted.
        """
        every: int = getattr(self, f"{what}_every")
        if step in (1, last_step) or step % every == 0:
            return True
        forever, steps = self.keep_every, self.keep_steps or ()
        return what == "checkpoint" and (step in steps or (forever is not None and step % forever == 0))

    def __post_init__(self) -> None:
        at_least_one = ("log_every", "eval_every", "eval_iters", "checkpoint_every", "max_to_keep", "keep_every")
        for name in (*at_least_one, "max_steps"):
            _check_at_least(name, getattr(self, name), 1)
        for name in ("patience", "spike_factor", "max_rewinds"):
            _check_at_least(name, getattr(self, name), 0)
        every = self.memory_checkpoint_every
        if every != "auto" and not (isinstance(every, int) and not isinstance(every, bool) and every >= 0):
            raise UserError(f"memory_checkpoint_every is {every!r}: it must be auto, a number of steps, or 0 for none")
        if self.memory_replicas not in (None, 0, 1):
            raise UserError(f"memory_replicas is {self.memory_replicas}: it must be 0 or 1, or left out")
        if not 0 <= self.val_fraction < 1:
            raise UserError(f"val_fraction is {self.val_fraction}: it must be at least 0 and below 1")
        if not 0 <= self.seed < 1 << 31:
            raise UserError(f"seed is {self.seed}: it must be at least 0 and below 2^31")
        if self.on_bad_step not in ("raise", "skip", "rewind"):
            raise UserError(f"on_bad_step is {self.on_bad_step!r}: it must be raise, skip or rewind")
        if self.verify_data not in ("on", "off"):
            raise UserError(f"verify_data is {self.verify_data!r}: it must be on or off")
        self._check_state()
        steps = self.profile_steps
        if steps is not None and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
            raise UserError(f"profile_steps is {steps}: it must be two steps, the first and the last, from 1")

    def _check_state(self) -> None:
        """Raises UserError where types, average and layout of the state do not fit together."""
        if not 0 <= self.ema < 1:
            raise UserError(f"ema is {self.ema}: it must be above 0 and below 1, such as 0.999, or 0 for none")
        if self.ema and self.use_bf16:
            raise UserError(
                f"ema is {self.ema} and use_bf16 is true: an average in bfloat16 stops moving, as its steps are below "
                f"its last digit; use bf16_compute, or leave one of the two out"
            )
        if self.use_bf16 and self.bf16_compute:
            raise UserError("use_bf16 and bf16_compute are both true: parameters are kept in one type, choose one")
        shards = self.virtual_shards
        if shards < 0 or shards & (shards - 1):
            raise UserError(f"virtual_shards is {shards}: it must be a power of two, such as 8, or 0 for none")


class LoopKeywords(TypedDict, total=False):
    """The fields of `LoopOptions` as keywords of a `Trainer`, for editors; a test compares the two."""

    log_every: int
    eval_every: int
    eval_iters: int
    checkpoint_every: int
    memory_checkpoint_every: int | str
    memory_replicas: int | None
    max_to_keep: int | None
    keep_best: bool
    keep_every: int | None
    keep_steps: list[int] | None
    export_weights: bool
    max_steps: int | None
    seed: int
    init_from: str | None
    val_fraction: float
    patience: int
    verify_data: Literal["on", "off"]
    on_bad_step: Literal["raise", "skip", "rewind"]
    spike_factor: float
    max_rewinds: int
    ema: float
    use_bf16: bool
    bf16_compute: bool
    fsdp: bool
    virtual_shards: int
    profile_steps: list[int] | None


@component
class ExperimentConfig:
    """Settings that `train` adds to a `Trainer`: the curriculum, the devices, W&B, and a sample at the end."""

    phases: list[dict[str, Any]] | None = None
    """The curriculum: a list of {steps or epochs, batch_size, seq_len}, where batch_size counts the rows of the global
    batch and seq_len the tokens read, the target included. A list of sizes, such as batch_size: [16, 32, 64], is a ramp
    (batch size warm-up): a phase for each, which read the same number of rows; see lr_scaling. Without phases there is
    one of batch_size rows of max_context + 1 tokens."""
    passes: Literal["together", "apart"] = "together"
    """Passes over data sets with weights. together: one that is used up leaves the blend until all are. apart: it
    begins its next pass at once and keeps its share, and no share changes the order in which it is read."""
    epochs: float = 1.0
    """Passes over the data, if no phases are given."""
    batch_size: int = 16
    """Rows of the global batch, of all devices and micro-batches together, if no phases are given."""
    grad_accum: int = 1
    """Gradient accumulation: micro-batches in a step. It divides the batch, that of every phase too, and does not
    change the data."""
    n_devices: int = 0
    """Devices to use, of all processes together; 0 for all."""
    fsdp_devices: int = 0
    """Devices that share one copy of parameters and moments with fsdp; 0 for all, 1: as without fsdp."""
    expert_devices: int = 1
    """Expert parallelism: number of devices that share the experts of `use_moe`, and divide n_experts. Tokens go to
    their experts and back; the rows of a batch are divided over these devices too."""
    tensor_devices: int = 1
    """Tensor parallelism: number of devices that share the computation of the same rows. Each has a part of the heads,
    hidden units and vocabulary."""
    deterministic: bool = False
    """Deterministic XLA operations: the same bits in every run. Slower on a GPU."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases: off; online, to its server; or offline, to files in the run directory that `wandb sync` sends
    later."""
    wandb_project: str = "roxxel-dist"
    """Project name at Weights & Biases."""
    name: str | None = None
    """Name of the run for people, in `top`, reports and W&B. Default: that of the run directory."""
    notes: str | None = None
    """A remark about the run, for reports and W&B."""
    tags: list[str] | None = None
    """Words to find the run by, in `top`, reports and W&B."""
    tensorboard: bool = False
    """Write TensorBoard event files to `tensorboard/` in the run directory."""
    eval_tasks: list[str] | None = None
    """Evaluation tasks: JSON-lines files, with * if you like, of {"context", "choices", "answer"} or of {"text"}. Their
    scores are logged with each validation, as task/<file>/acc, task/<file>/acc_norm and task/<file>/bits_per_byte."""
    sample_prompt: str = ""
    """Prompt of the sample at the end of the run. If empty, the sample starts a new document."""
    sample: Literal["auto", "on", "off"] = "auto"
    """Print some lines of generated text at the end of the run. auto: only after a run of 30 seconds or more."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "grad_accum"):
            _check_at_least(name, getattr(self, name), 1)
        for name, least in (("n_devices", 0), ("fsdp_devices", 0), ("expert_devices", 1), ("tensor_devices", 1)):
            _check_at_least(name, getattr(self, name), least)
        if self.passes not in ("together", "apart"):
            raise UserError(f"passes is {self.passes!r}: it must be together or apart")
        if self.sample not in ("auto", "on", "off"):
            raise UserError(f"sample is {self.sample!r}: it must be auto, on or off")
        if not self.epochs > 0:
            raise UserError(f"epochs is {self.epochs}: it must be above 0")
        for field in ("name", "notes"):
            if (text := getattr(self, field)) is not None and not (isinstance(text, str) and text.strip()):
                raise UserError(f"{field} is {text!r}: it must be a text, or left out")
        if self.tags is not None and not all(isinstance(tag, str) and 0 < len(tag) <= 64 for tag in self.tags):
            raise UserError(
                f"tags is {self.tags!r}: it must be a list of words of 1 to 64 characters (W&B takes no longer one)"
            )
        if self.eval_tasks is not None and not self.eval_tasks:
            raise UserError("eval_tasks is an empty list: name at least one file, or leave it out")
        if self.phases is not None and not self.phases:
            raise UserError("phases is an empty list: give at least one phase, or leave it out")


def _check_at_least(name: str, value: float | None, least: int) -> None:
    if value is not None and not value >= least:
        raise UserError(f"{name} is {value}: it must be at least {least}")
