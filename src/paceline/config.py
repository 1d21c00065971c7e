"""The settings of a run: one frozen tree. `config_file` reads it from RUN.yaml and writes it back in full.

Unknown keys are errors, never ignored. This module stays free of torch so that the command line answers at once.
"""

import os
import shlex
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

DType = Literal["float32", "bfloat16"]
Fp8 = Literal["off", "on", "auto"]
Decay = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(ge=1e-6, le=1000)]
Whole = Annotated[int, Field(lt=2**31)]
Count = Annotated[Whole, Field(ge=1)]
Tokens = Annotated[int, Field(ge=1, le=2**24)]  # of what arrays are made for


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value(cls, value: Any) -> Any:
        """No setting is one, and pydantic would take true as 1."""
        if any(isinstance(item, bool) for item in (value if isinstance(value, list | tuple) else [value])):
            raise PydanticCustomError("truth_value", "must not be true or false")
        return value


class TargetSettings(Section):
    """The frozen language model that the drafter learns to precede."""

    model: str = Field(description="folder with config.json and *.safetensors, or a hub id (then set revision)")
    revision: str | None = Field(None, description="commit of the hub id; null for a folder")
    dtype: DType = Field("bfloat16", description="number format in which the target runs")
    fast: Literal["auto", "off"] = Field(
        "auto", description="auto: a plain decoder on a GPU skips padding and fuses; off: transformers' own forward"
    )
    fp8: Fp8 = Field(
        "off",
        description="on: its products in fp8 (half the memory, features a little off); auto: if the doctor agrees",
    )
    features: Literal["as_trained", "fp8"] = Field("as_trained", description="fp8: wait for the drafter as bytes")
    devices_per_replica: Count = Field(
        1, description="devices in a row of pipeline.targets that share a replica's layers, for targets larger than one"
    )

    @model_validator(mode="after")
    def _check(self) -> "TargetSettings":
        if self.fp8 == "on" and (self.fast == "off" or self.dtype != "bfloat16"):
            raise ValueError(f"fp8: on needs fast: auto and dtype: bfloat16, got {self.fast} and {self.dtype}")
        return self


class DrafterSettings(Section):
    """The trained block-diffusion model."""

    block_size: int = Field(16, ge=2, le=4096, description="tokens in a block: anchor and block_size - 1 drafted ones")
    layers: Count = Field(5, description="decoder layers of the drafter")
    taps: tuple[Whole, ...] = Field(min_length=1, description="target layers (0-based) whose outputs the drafter reads")
    mask_token_id: Whole = Field(ge=0, description="a row of the target's embedding that never occurs in the data")
    heads: Count = Field(description="attention heads")
    kv_heads: Count = Field(description="key/value heads; divides heads")
    head_dim: int = Field(ge=2, le=2**16, description="width of a head; even, for the rotary embedding")
    intermediate_size: Count = Field(description="width of the MLP")
    rope_theta: float = Field(gt=0, description="rotary base; the target's")
    rms_norm_eps: float = Field(1e-6, gt=0, description="epsilon of every RMSNorm")

    @model_validator(mode="after")
    def _check(self) -> "DrafterSettings":
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads, got {self.kv_heads} and {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if list(self.taps) != sorted(set(self.taps)) or self.taps[0] < 0:
            raise ValueError(f"taps must ascend strictly from 0 up, got {self.taps}")
        return self


class DataSettings(Section):
    """Where the tokenized completions lie and how they are batched for the target."""

    dataset: str | tuple[str, ...] = Field(description="dataset folder that `paceline prepare` wrote, or several")
    weights: tuple[Weight, ...] | None = Field(None, min_length=1, description="passes over each dataset; null: 1 each")
    max_length: Whole = Field(4096, ge=2, description="tokens a sample may have, in train and `prepare --settings`")
    on_long: Literal["refuse", "truncate"] = Field(
        "refuse", description="what `prepare --settings` does with longer samples: quarantine or cut"
    )
    layout: Literal["bucketed", "trimmed", "packed"] = Field(
        "trimmed", description="rows padded to their bucket's edge, trimmed to the longest, or packed end to end in one"
    )
    buckets: Count = Field(6, description="length buckets; edges are chosen to waste least padding; not for packed")
    edges: tuple[Whole, ...] | None = Field(
        None, min_length=1, description="hand-written upper edges (inclusive), instead of buckets; not for packed"
    )
    align: Tokens = Field(64, description="bucket edges are multiples of this many tokens; not for packed")
    token_budget: Tokens = Field(32768, description="padded tokens a batch may hold; packed: its row's tokens")
    min_batch: Count = Field(1, description="samples a batch holds at least, whatever the budget; not for packed")
    max_batch: Count = Field(64, description="samples a batch holds at most; not for packed")
    reshuffle: Literal["samples", "batches"] = Field(
        "samples", description="drawn anew each epoch: who is in a batch (samples), or only the order of batches"
    )
    prefetch: Count = Field(8, description="micro-batches that are built ahead")
    bad_rows: float = Field(0.01, ge=0, lt=1, description="share of a dataset's rows that may be set aside as damaged")

    @property
    def folders(self) -> tuple[str, ...]:
        """The dataset folders."""
        return (self.dataset,) if isinstance(self.dataset, str) else self.dataset

    @field_validator("dataset", mode="before")
    @classmethod
    def _folder_or_list(cls, value: Any) -> Any:
        """One message, where pydantic would tell about both kinds."""
        items = value if isinstance(value, list | tuple) else [value]
        if not items or not all(isinstance(item, str) and "\0" not in item for item in items):
            raise PydanticCustomError("folders", "must be a folder or a list of folders, numbers in quotes")
        if len({os.path.realpath(item) for item in items}) < len(items):  # a/ is a
            raise PydanticCustomError("folders", "must name each folder once; data.weights takes one more often")
        return value

    @model_validator(mode="after")
    def _check(self) -> "DataSettings":
        if self.max_batch < self.min_batch:
            raise ValueError(f"max_batch must be at least min_batch, got {self.max_batch} < {self.min_batch}")
        edges = self.edges or ()
        if list(edges) != sorted(set(edges)):
            raise ValueError(f"edges must ascend strictly, got {edges}")
        if any(edge % self.align for edge in edges):
            raise ValueError(f"edges must be multiples of align ({self.align}), got {edges}")
        if edges and self.layout == "packed":
            raise ValueError(f"edges are of length buckets, which layout: packed does without, got {edges}")
        if self.weights is not None and len(self.weights) != len(self.folders):
            raise ValueError(f"weights must be one a dataset, got {len(self.weights)} for {len(self.folders)}")
        if self.reshuffle == "batches" and any(weight % 1 for weight in self.weights or ()):
            raise ValueError(f"weights must be whole with reshuffle: batches (the same rows again), got {self.weights}")
        return self


class TrainSettings(Section):
    """The one shape of a micro-batch, the optimizer and the schedule."""

    epochs: int = Field(6, ge=1, le=10**6, description="passes over the dataset")
    max_steps: Count | None = Field(None, description="stop after this many optimizer steps; null: all epochs")
    context_slots: Tokens = Field(8192, description="C: context tokens in a micro-batch, samples laid end to end")
    anchor_slots: Tokens = Field(1024, description="A: blocks in a micro-batch")
    anchors_per_sample: Count = Field(512, description="blocks drawn from a sample and epoch, at most")
    batches_per_step: Count = Field(1, description="plan batches that make one optimizer step")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="adamw, or muon for matrices with adamw for norms (fewer steps, each dearer)"
    )
    lr: float = Field(6e-4, gt=0, description="peak learning rate")
    schedule: Literal["cosine", "wsd"] = Field("cosine", description="after the warm-up; wsd: stays until decay_share")
    decay_share: float = Field(0.2, gt=0, le=1, description="share of the steps in which wsd brings the rate down")
    warmup_share: float = Field(0.04, ge=0, lt=1, description="share of the steps in which the rate rises to lr")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="rate at the end, as a share of lr")
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="AdamW's moment decays; the second is Muon's momentum")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay of matrices")
    clip: float = Field(1.0, gt=0, description="largest gradient norm")
    gamma: float | None = Field(None, gt=0, description="decay of slot weights, exp(-(k-1)/gamma); null: by block_size")
    dtype: DType = Field("bfloat16", description="number format of the drafter's matrix products; weights are float32")
    fp8: Fp8 = Field(
        "off",
        description="on: the drafter's products, also backward, and the head's in fp8; auto: if the doctor agrees",
    )
    recompute: Literal["off", "layers"] = Field("off", description="layers: backward computes all but the last again")
    moments: Literal["float32", "8bit"] = Field("float32", description="format of AdamW's moments of matrices")
    offload: Literal["off", "moments"] = Field("off", description="moments: those of matrices stay in host memory")
    policy: Literal["auto", "eager", "compiled", "captured"] = Field(
        "auto", description="how the step runs; auto: as `paceline doctor` found possible here; captured needs a GPU"
    )
    logits_mib: Count = Field(1024, description="largest buffer of logits, in MiB")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of initial weights, order and anchors")
    init_from: str | None = Field(
        None, min_length=1, description="folder of a z-lab, speculators, SpecForge or TorchSpec drafter to start from"
    )
    log_every: Count = Field(10, description="optimizer steps between two progress events")

    @model_validator(mode="after")
    def _check(self) -> "TrainSettings":
        if self.anchors_per_sample > self.anchor_slots:
            raise ValueError(
                f"anchors_per_sample ({self.anchors_per_sample}) must not exceed anchor_slots ({self.anchor_slots})"
            )
        if self.fp8 == "on" and (self.dtype != "bfloat16" or self.policy == "eager"):
            raise ValueError(
                f"fp8: on needs dtype: bfloat16 and a policy other than eager, got {self.dtype} and {self.policy}"
            )
        if self.optimizer == "muon" and (self.moments, self.offload) != ("float32", "off"):
            raise ValueError(
                "moments: 8bit and offload: moments need optimizer: adamw (Muon's momentum stays float32 there), "
                f"got muon, {self.moments} and {self.offload}"
            )
        return self


class PipelineSettings(Section):
    """Which role runs where, and what may wait between them."""

    targets: tuple[str, ...] = Field(
        ("cpu",), min_length=1, description="one device a target replica, or target.devices_per_replica in a row"
    )
    drafters: tuple[str, ...] = Field(("cpu",), min_length=1, description="one device a drafter rank")
    target_threads: Count = Field(1, description="CPU threads of each target replica's matrix products")
    drafter_threads: Count = Field(1, description="CPU threads of each drafter rank's matrix products")
    credit_gib: float = Field(2.0, gt=0, le=2**20, description="room for features at the drafters, in GiB")
    ready_timeout_s: float = Field(600.0, gt=0, le=1e6, description="longest start-up of a role, in seconds")
    work_timeout_s: float = Field(
        600.0, gt=0, le=1e6, description="longest work on one micro-batch or step, and longest standstill, in seconds"
    )
    restarts: Whole = Field(3, ge=0, description="times that target replicas which fail are restarted, of all together")
    feature_cache: Literal["off", "memory", "disk"] = Field(
        "off", description="keep features so that later epochs skip the target; needs data.reshuffle: batches"
    )
    feature_cache_gib: float = Field(4.0, gt=0, le=2**20, description="GiB the cache may reach; the rest is recomputed")


class CheckpointSettings(Section):
    """When the state of a run is saved, to go on from with `paceline train --resume`."""

    every_minutes: float = Field(10.0, gt=0, le=1e6, description="minutes between two saves")
    every_steps: Count | None = Field(None, description="optimizer steps between two saves, instead of every_minutes")
    keep: Count = Field(2, description="newest checkpoints that stay; while one is written, it comes on top")
    on_full_disk: Literal["stop", "wait"] = Field("stop", description="what the run does until there is room again")
    grace_s: float = Field(60.0, gt=0, le=1e6, description="longest a stop may take, from SIGTERM or a notice on, in s")
    notice_file: str | None = Field(
        None, min_length=1, description="file whose appearance asks the run to save and stop, as SIGTERM does"
    )


class EvaluateSettings(Section):
    """How good the drafter is while the run trains: on held-out completions, and by decoding; the best state stays."""

    held_out: str | None = Field(
        None, min_length=1, description="dataset folder that `paceline prepare` wrote of others; null: no held-out loss"
    )
    every_steps: Count = Field(200, description="optimizer steps between two held-out losses; the last step has one")
    max_rows: Count = Field(256, description="rows of it that are looked at, the first ones")
    device: str | None = Field(
        None, min_length=1, description="where a whole target decodes with the drafter for its true acceptance; or null"
    )
    tau_every_steps: Count = Field(1000, description="steps between two true acceptances; the last step has one")
    prompts: str | None = Field(
        None, min_length=1, description="JSONL file or known set that is decoded; null: the prompts of held_out's rows"
    )
    max_prompts: Count = Field(64, description="prompts that are decoded: as `paceline evaluate --limit` takes them")
    max_new_tokens: Count = Field(256, description="tokens an answer may have; greedy")
    rows: Count = Field(16, description="prompts that are decoded at once")
    disagreement: float = Field(
        0.3, gt=0, lt=1, description="share by which true acceptance may fall short of training's before it is told"
    )

    @property
    def best_by(self) -> Literal["tau", "loss"] | None:
        """What decides which state is the best: true acceptance, held-out loss, or nothing."""
        return "tau" if self.device is not None else "loss" if self.held_out is not None else None

    def due(self, steps: int, total_steps: int) -> bool:
        """Return whether a held-out loss follows when `steps` are done; true acceptance is compared with it."""
        if self.held_out is None:
            return False
        return steps % self.every_steps == 0 or steps == total_steps or self.tau_due(steps, total_steps)

    def tau_due(self, steps: int, total_steps: int) -> bool:
        """Return whether the state after `steps` steps is to decode."""
        return self.device is not None and (steps % self.tau_every_steps == 0 or steps == total_steps)

    @model_validator(mode="after")
    def _check(self) -> "EvaluateSettings":
        if self.device is not None and self.prompts is None and self.held_out is None:
            raise ValueError("device needs prompts to decode: set prompts, or held_out whose rows have some")
        return self


class GuardSettings(Section):
    """Which updates are not applied, and when the run goes back to a checkpoint."""

    spike: float | None = Field(
        10.0,
        gt=1,
        description="loss over so many medians (and 1 nat), or norm (median at least clip): not applied; or null",
    )
    window: int = Field(100, ge=2, le=10**5, description="steps the median is of, and in which rejected ones count")
    rejected: Whole = Field(
        5,
        ge=0,
        description="steps rejected in a window; with more the run goes back, once, to the last good checkpoint",
    )


class ObserveSettings(Section):
    """What a run tells of itself while it works, and who is told besides the console."""

    sample_s: float = Field(
        5.0, ge=0.1, le=1e6, description="seconds between two `sample` events: who works, who waits"
    )
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = Field(
        (), description="tensorboard, wandb, mlflow, trackio: those that are told, each an extra of paceline"
    )
    on_end: str | tuple[str, ...] | None = Field(
        None, description="command that is run when the run ends; a text is split as a shell would, or list"
    )

    @property
    def end_command(self) -> tuple[str, ...]:
        """The words of `on_end`; none without one."""
        return tuple(shlex.split(self.on_end)) if isinstance(self.on_end, str) else self.on_end or ()

    @field_validator("on_end", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        """One message, where pydantic would tell about both kinds."""
        words = value if isinstance(value, list | tuple) else [value]
        if value is not None and not all(isinstance(word, str) and "\0" not in word for word in words):
            raise PydanticCustomError("words", "must be a command or a list of its words, numbers in quotes")
        return value

    @model_validator(mode="after")
    def _check(self) -> "ObserveSettings":
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers must name each once, got {list(self.trackers)}")
        try:
            words = self.end_command
        except ValueError as error:
            raise ValueError(f"on_end must be a command, got {self.on_end!r}: {error}") from None
        if self.on_end is not None and not (words and words[0]):
            raise ValueError(f"on_end must name a program, got {self.on_end!r}")
        return self


class RunSettings(Section):
    """Everything a run depends on."""

    run_dir: str = Field(min_length=1, description="folder of the run: settings, events, checkpoints")
    target: TargetSettings
    drafter: DrafterSettings
    data: DataSettings
    train: TrainSettings = TrainSettings()
    pipeline: PipelineSettings = PipelineSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    guard: GuardSettings = GuardSettings()
    observe: ObserveSettings = ObserveSettings()

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of the roles: targets, the evaluator where there is one, drafters."""
        evaluator = () if self.evaluate.device is None else (self.evaluate.device,)
        return (*self.pipeline.targets, *evaluator, *self.pipeline.drafters)

    @property
    def replicas(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each target replica, in the order of the layers that they have."""
        each, targets = self.target.devices_per_replica, self.pipeline.targets
        return tuple(targets[at : at + each] for at in range(0, len(targets), each))

    @property
    def roles(self) -> int:
        """How many roles there are: target replicas, the evaluator where there is one, drafter ranks."""
        return len(self.replicas) + (self.evaluate.device is not None) + len(self.pipeline.drafters)

    @model_validator(mode="after")
    def _check_replicas(self) -> "RunSettings":
        each, targets = self.target.devices_per_replica, self.pipeline.targets
        if len(targets) % each:
            raise ValueError(
                f"pipeline.targets must name target.devices_per_replica ({each}) devices for each replica, got "
                f"{len(targets)}: name {len(targets) + -len(targets) % each}, or lower the other"
            )
        for devices in self.replicas:
            gpus = [device for device in devices if device != "cpu"]
            if twice := next((device for device in gpus if gpus.count(device) > 1), None):
                raise ValueError(
                    f"pipeline.targets must name other devices for the layers of one replica, of which there are "
                    f"{each} in a row (target.devices_per_replica), got {twice} twice in {list(devices)}"
                )
        return self

    @model_validator(mode="after")
    def _check(self) -> "RunSettings":
        held_out = self.evaluate.held_out
        if held_out is not None and os.path.realpath(held_out) in map(os.path.realpath, self.data.folders):
            raise ValueError(f"evaluate.held_out must be none of the folders of data.dataset, got {held_out}")
        if self.pipeline.feature_cache != "off" and self.data.reshuffle != "batches":
            raise ValueError(
                f"pipeline.feature_cache: {self.pipeline.feature_cache} keeps features by batch, so it needs "
                f"data.reshuffle: batches, got {self.data.reshuffle}"
            )
        if self.data.layout == "packed" and self.data.token_budget > self.train.context_slots:
            raise ValueError(
                f"data.token_budget must not exceed train.context_slots with data.layout: packed, "
                f"got {self.data.token_budget} > {self.train.context_slots}: lower it to that"
            )
        return self
