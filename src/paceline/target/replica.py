"""A target replica's part in a run: take token batches, give feature batches."""

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Num
from torch import Tensor

from paceline import blocks
from paceline.config import TargetSettings
from paceline.drafter.packed import pack
from paceline.records import FeatureBatch, RunError, TokenBatch, UserError
from paceline.runtime.compiling import Policy
from paceline.runtime.gate import Gate
from paceline.runtime.streams import wait_for
from paceline.target.feature_cache import FeatureCache
from paceline.target.halves import halves
from paceline.target.lanes import Lanes
from paceline.target.load import TargetFacts, fingerprint, load_trunk
from paceline.target.model import FeatureTarget
from paceline.target.one_read import LoadTrunk
from paceline.target.products import check_fp8
from paceline.target.self_check import check_features

_IDLE = "waiting for data"


@dataclass(frozen=True, slots=True)
class Pace:
    """How a replica computes."""

    fast: bool = False  # on the fast path, where the target is plain and it gives the same
    compiled: bool = False  # that path
    fp8: bool = False  # its products


def pace_of(target: TargetSettings, device: str, policy: Policy) -> Pace:
    """Return how a replica on a device computes.

    A target.fp8 that is still auto was found to work on the device (see choose_fp8).

    On a CPU the fast path rounds otherwise and gains little, so there it is taken only where the step is compiled.

    Raises:
        UserError: fp8 is asked for and cannot be had there.
    """
    where = torch.device(device)
    fast = target.fast == "auto" and (where.type == "cuda" or policy == "compiled")
    if target.fp8 == "on" and not fast:
        raise UserError(
            f"target.fp8: on is a part of the fast path, which on {device} (pipeline.targets) runs with train.policy: "
            f"compiled only, got {policy}. Set it to off, or use a GPU."
        )
    if target.fp8 == "on":
        check_fp8(where, "target.fp8")
    return Pace(fast, fast and policy != "eager", target.fp8 == "on" or (target.fp8 == "auto" and fast))


_PLAIN = Pace()


def under_way(devices: int) -> int:
    """Return how many micro-batches a replica on so many devices has under way at once."""
    return devices + 1 if devices > 1 else 1


class TargetReplica:
    """One copy of the target on one device, or with its layers on several. `doing` says what it works on, for a message
    if it fails.

    On several devices it has as many micro-batches under way, and one more so that none of them waits while features
    are handed over; `device` is the last one, where features are made.
    """

    def __init__(
        self,
        index: int,
        device: str,
        *,
        facts: TargetFacts,
        taps: tuple[int, ...],
        dtype: torch.dtype,
        wire: torch.dtype,
        largest: TokenBatch,
        source: Iterable[TokenBatch],
        cache: FeatureCache,
        deliver: Callable[[FeatureBatch], bool],
        gate: Gate,
        room: Callable[[TokenBatch], Tensor | None] = lambda tokens: None,
        on_split: Callable[["TargetReplica", TokenBatch, int], None],
        on_loaded: Callable[["TargetReplica", float], None] = lambda replica, share: None,
        pace: Pace = _PLAIN,
        on_path: Callable[["TargetReplica", str], None] = lambda replica, reason: None,
        needs_fp8: bool = True,
        on_no_fp8: Callable[["TargetReplica", str], None] = lambda replica, reason: None,
        alarm: Callable[[str], None] = lambda guard: None,
        made: Callable[[], FeatureTarget] | None = None,
        before: Sequence[str] = (),
        packs: bool = False,
        load_trunk: LoadTrunk = load_trunk,
    ) -> None:
        """`packs` says that features are handed over as bytes.

        `before` are the devices of the layers in front, which are not on `device` then; from `source` several
        threads take in turn, each with an iterator of its own.

        `deliver` returns whether the features were still wanted; `room` returns where a micro-batch's may be
        written at once, on this device, and is theirs until they are delivered; `on_split` is told of a micro-batch
        that is computed again for lack of memory, and in how many parts; `on_loaded` which share of the weights is
        there; `on_path` why the fast path that was asked for is not taken, nothing if it is; `on_no_fp8` why a target
        that was to compute in fp8 cannot, and without `needs_fp8` goes on in its own format; `alarm` what did not fit
        what was compiled. `made` gives a target that is there already, instead of loading one with `load_trunk`.
        """
        self.name, self.device, self._before, self._doing = f"target replica {index}", device, tuple(before), ""
        self._lanes: Lanes | None = None
        self._facts, self._taps, self._dtype, self._wire = facts, taps, dtype, wire
        self._largest, self._source, self._cache = largest, source, cache
        self._deliver, self._gate, self._room, self._packs = deliver, gate, room, packs
        self._on_split, self._on_loaded = on_split, on_loaded
        self.pace, self._on_path, self._alarm, self._made = pace, on_path, alarm, made
        self._needs_fp8, self._on_no_fp8 = needs_fp8, on_no_fp8
        self._load_trunk = load_trunk

    def load(self) -> None:
        """Load the weights and see that they give what they should.

        Raises:
            UserError: they do not.
        """
        self._load()
        if self.pace.fast:
            reason = self._target.quicken(fp8=self.pace.fp8)
            if reason and self._may_leave_fp8:
                self._load_without_fp8(reason)
                reason = self._target.quicken()
            self._told_path(reason, certain=not self.pace.compiled)
        for device in self._before:  # for the last one waits who called
            wait_for(device)

    @property
    def _may_leave_fp8(self) -> bool:
        return self.pace.fp8 and not self._needs_fp8

    def _load_without_fp8(self, reason: str) -> None:
        """Load again, because in fp8 the weights' own format was let go of."""
        self.pace = replace(self.pace, fp8=False)
        self._on_no_fp8(self, reason)
        del self._target  # there may be no room for both
        self._load()

    def _load(self) -> None:
        if self._made is not None:
            self._revision, self._target = self._facts.revision, self._made()
        else:
            self._revision = fingerprint(self._facts.folder)  # of what is loaded now, not of what was looked at before
            self._target = FeatureTarget(
                self._facts,
                self._taps,
                dtype=self._dtype,
                device=self.device,
                before=self._before,
                on_loaded=partial(self._on_loaded, self),
                load=self._load_trunk,
            )
        check_features(self._target, self._facts.name, packed=False)
        self._unpackable: UserError | None = None
        try:
            check_features(self._target, self._facts.name, packed=True)
        except UserError as error:  # which matters only where samples share a row
            self._unpackable = error

    @property
    def attention(self) -> str | None:
        """Which kernel reads the samples, once weights are loaded; None on the plain path."""
        return self._target.kernel

    def unload(self) -> None:
        """Let go of the weights; the replica is of no use any more. What it has under way must have been refused."""
        self.join()
        vars(self).pop("_target", None)

    def warm(self) -> dict[str, object]:
        """Rehearse the largest micro-batch and return what the drafter must agree with.

        Raises:
            RunError: the device has too little memory for it; what to lower is said.
        """
        self.doing = f"the largest micro-batch {tuple(self._largest.input_ids.shape)}"
        try:
            if self.pace.compiled and self._target.is_fast:
                reason = self._target.compile(self._largest, self._alarm, self.name)
                if reason and self._may_leave_fp8:
                    self._load_without_fp8(reason)
                    plain = self._target.quicken()
                    reason = plain or self._target.compile(self._largest, self._alarm, self.name)
                self._told_path(reason, certain=True)
            under_way = [self._whole(self._largest) for _ in range(self._width)]
            features_TD = under_way[0]
            if self._packs:
                pack(features_TD, len(self._taps))
        except torch.OutOfMemoryError as error:
            raise _too_large(self._largest, error) from error
        self.doing = ""
        return {
            "target revision": self._revision,
            "taps": self._taps,
            "feature width": features_TD.shape[1],
            "feature dtype": str(features_TD.dtype),
            "rope theta": self._facts.rope_theta,
            # Only replicas have it: whose features a micro-batch gets must not matter.
            "the target's products": "fp8" if self.pace.fp8 else str(self._dtype),
        }

    def run(self) -> None:
        """Serve token batches until the stream ends.

        Raises:
            RunError: the device has too little memory for half a micro-batch; what to lower is said.
        """
        if not self._before:
            return self._serve()
        target = self._target
        self._lanes = Lanes(self._width, self.name, self.device, self._gate, target.stage, target.where)
        self._lanes.run(self._serve)

    @property
    def doing(self) -> str:
        """What it works on; of several micro-batches the one that failed, or that others wait for."""
        if self._lanes is None or self._doing:
            return self._doing
        return self._lanes.doing or _IDLE

    @doing.setter
    def doing(self, text: str) -> None:
        self._doing = text

    @property
    def stuck_at(self) -> int | None:
        """The place in the stream of the micro-batch that it failed at or hangs at, where several are under way."""
        return self._lanes.stuck_at if self._lanes is not None else None

    def join(self) -> None:
        """Wait a while for threads of its own, which have been told to leave."""
        if self._lanes is not None:
            self._lanes.join()

    def give_up(self) -> None:
        """Let nobody wait for what hangs here."""
        if self._lanes is not None:
            self._lanes.give_up()

    @property
    def _width(self) -> int:
        """How many micro-batches are under way at once."""
        return under_way(1 + len(self._before))

    def _now(self, seq: int, text: str) -> None:
        """Say what this thread does about a micro-batch."""
        if self._lanes is None:
            self.doing = text
        else:
            self._lanes.now(seq, text)

    def _serve(self) -> None:
        self._now(-1, _IDLE)
        for tokens in self._source:
            self._now(tokens.seq, f"micro-batch {tokens.seq} (rows {', '.join(map(str, tokens.samples[:8]))})")
            with self._gate.work():
                features_TD = self._cache.get(tokens.samples)
                fresh = features_TD is None
                if features_TD is None:
                    features_TD = self._features(tokens)
                kept_TD = self._to_keep(tokens, features_TD) if fresh else None
            wanted = self._deliver(FeatureBatch(tokens, features_TD, blocks.context_positions(tokens.lengths)))
            if wanted and kept_TD is not None:  # only now: nothing is kept of a replica that was given up
                with self._gate.work():
                    self._cache.put(tokens.samples, kept_TD)
            del features_TD, kept_TD
            self._now(-1, _IDLE)  # the next micro-batch is built while it is asked for, and may be what fails
        self._now(-1, "")

    def _told_path(self, reason: str, *, certain: bool) -> None:
        """Tell which path is taken, once that is certain: after `reason` the plain one, without the fast one."""
        if reason and self.pace.fp8:
            raise UserError(
                f"target.fp8: on is a part of the fast path, which {self._facts.name} cannot take: {reason}. Set it to "
                "off, or use another target."
            )
        if reason or certain:
            self._on_path(self, reason)

    def _features(self, tokens: TokenBatch) -> Num[Tensor, "T D"]:
        try:
            return self._handed(tokens, self._room(tokens))
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # which hold what there was room for
        # Behind the handler, where nothing holds the error any more.
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()
        parts = halves(tokens) or (tokens,)
        self._on_split(self, tokens, len(parts))
        try:
            return torch.cat([self._handed(part) for part in parts])
        except torch.OutOfMemoryError as error:
            raise _too_large(tokens, error) from error

    def _to_keep(self, tokens: TokenBatch, features_TD: Tensor) -> Tensor | None:
        """Return what the cache may hold on to, if it wants it: others write into the room once this was read."""
        if not self._cache.wants(tokens.samples, features_TD.nbytes):
            return None
        room_TD = self._room(tokens)
        lent = room_TD is not None and room_TD.data_ptr() == features_TD.data_ptr()
        return features_TD.clone() if lent else features_TD

    def _handed(self, tokens: TokenBatch, room_TD: Tensor | None = None) -> Num[Tensor, "T D"]:
        """Return features as they are handed over."""
        if not self._packs:
            return self._whole(tokens, room_TD)
        return pack(self._whole(tokens), len(self._taps), room_TD)

    def _whole(self, tokens: TokenBatch, room_TD: Tensor | None = None) -> Float[Tensor, "T D"]:
        if tokens.packed and self._unpackable and not self._target.is_fast:
            raise self._unpackable
        return self._target.features(tokens, room_TD).to(self._wire)


def _too_large(tokens: TokenBatch, error: BaseException) -> RunError:
    rows, width = tokens.input_ids.shape
    return RunError(
        f"out of memory. A micro-batch of {tokens.num_tokens:,} tokens ({rows} x {width} with padding) must fit beside "
        "the target's weights, at least in two halves. Lower data.token_budget or train.context_slots, or give the "
        f"target a device of its own ({' '.join(str(error).split())[:200]})"
    )
