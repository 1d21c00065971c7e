"""The frozen target as a source of features, alone (training) or together with logits (decoding).

A tap is the output of a decoder layer, before the next layer and before the final norm: what transformers lists as
`hidden_states[layer + 1]`. A token's feature is its m taps side by side, in ascending order of layers.

Shapes: R rows, S padded length, T real tokens (training) or tokens of a row (decoding), D = m * H, V vocabulary.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from paceline.blocks import context_positions
from paceline.drafter.ends import soft_cap
from paceline.records import TokenBatch, UserError
from paceline.runtime.linear import use_onednn
from paceline.target import attention
from paceline.target.cache import RowCache
from paceline.target.conventions import ATTENTION, find_conventions, rope_of_batch
from paceline.target.fast import FastTrunk
from paceline.target.layers import why_not_plain
from paceline.target.load import TargetFacts, decoder_of, load_causal, load_config, load_trunk
from paceline.target.one_read import LoadTrunk
from paceline.target.self_check import Wanted, check_decoding, plain_logits
from paceline.target.stages import Sent, Stages, load_stages, sent
from paceline.target.varlen import Kernel


def check_taps(taps: Sequence[int], facts: TargetFacts) -> None:
    """Refuse taps that a serving engine could not capture.

    Raises:
        UserError: a tap lies outside 0..N-2. The last layer is excluded: engines capture the input of the next one.
    """
    wrong = [tap for tap in taps if not 0 <= tap <= facts.num_layers - 2]
    if wrong:
        raise UserError(
            f"drafter.taps must lie in 0..{facts.num_layers - 2} for {facts.name} ({facts.num_layers} layers), "
            f"got {wrong}. Remove or lower them."
        )


class Taps:
    """Forward hooks that keep the tapped layers' outputs of the forward that runs in a thread."""

    def __init__(self, layers: nn.ModuleList, taps: Sequence[int], device: torch.device | None = None) -> None:
        """They are kept where they are, or on a device."""
        self._own, self._device = threading.local(), device
        for tap in taps:
            layers[tap].register_forward_hook(self._keep)

    def _keep(self, _module: nn.Module, _args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self._outputs.append(sent(hidden, self._device or hidden.device))

    @property
    def _outputs(self) -> list[Sent]:
        kept: list[Sent] = vars(self._own).setdefault("outputs", [])
        return kept

    def take(self) -> Float[Tensor, "R S D"]:
        """Return the features of the forward that just ran and forget them."""
        features = torch.cat([output.arrived() for output in self._outputs], dim=-1)
        self._outputs.clear()
        return features

    def forget(self) -> None:
        """Forget what a forward that failed has left."""
        self._outputs.clear()


class FeatureTarget:
    """The target up to its deepest tap; it never computes logits.

    It computes on the plain path, transformers' own model, until `quicken` finds that the fast one gives the same.
    """

    def __init__(
        self,
        facts: TargetFacts,
        taps: Sequence[int],
        *,
        dtype: torch.dtype,
        device: str,
        before: Sequence[str] = (),
        on_loaded: Callable[[float], None] = lambda share: None,
        load: LoadTrunk = load_trunk,
    ) -> None:
        """Load it; see load_trunk, which is `load` unless others load the same (see OneRead). Features are made on
        `device`; where there are others `before`, layers lie on those first."""
        check_taps(taps, facts)
        if before:
            trunk, stages = load_stages(facts, max(taps), dtype=dtype, devices=(*before, device), on_loaded=on_loaded)
            self._hold(trunk, taps, facts.vocab_size, stages)
        else:
            trunk = load(facts, max(taps), dtype=dtype, device=device, on_loaded=on_loaded)
            self._hold(trunk, taps, facts.vocab_size)

    @classmethod
    def around(cls, trunk: Any, taps: Sequence[int]) -> "FeatureTarget":
        """Return a target made of a decoder that is there already and ends at its deepest tap."""
        target = cls.__new__(cls)
        target._hold(trunk, taps, trunk.config.vocab_size)
        return target

    def _hold(self, trunk: Any, taps: Sequence[int], vocab_size: int, stages: Stages | None = None) -> None:
        self.device, self.vocab_size = trunk.device, vocab_size
        self._which = tuple(taps)
        self._trunk, self._stages = trunk, stages
        self._last = stages.devices[-1] if stages else trunk.device
        self._taps = Taps(trunk.layers, taps, self._last if stages else None)
        self._fast: FastTrunk | None = None

    @property
    def is_fast(self) -> bool:
        """Whether features are computed on the fast path."""
        return self._fast is not None

    @property
    def kernel(self) -> Kernel | None:
        """What computes attention on the fast path; None on the plain one, where transformers chooses."""
        return self._fast.kernel if self._fast else None

    @property
    def recompiles(self) -> int:
        """Calls that torch would have compiled again after warm-up."""
        return self._fast.recompiles if self._fast else 0

    def quicken(self, *, fp8: bool = False) -> str:
        """Compute on the fast path from now on if it gives what the plain one does; return why not, "" if so.

        With `fp8` the products' own weights are let go of, and the plain path is gone.
        """
        if reason := why_not_plain(self._trunk, fp8=fp8):
            return reason
        try:
            self._wanted = Wanted(self.read, self.vocab_size)
            fast = FastTrunk(self._trunk, self._which, self._stages)
            reason = self._wanted.why_not(fast.features, fp8=False)
            if fp8 and not reason:
                fast.quantize()
                reason = self._wanted.why_not(fast.features, fp8=True)
        except (RuntimeError, ImportError, OSError) as error:  # of a kernel that this device or build has not
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        self._fp8 = fp8
        self._fast = None if reason else fast
        return reason

    def compile(self, largest: TokenBatch, alarm: Callable[[str], None], who: str = "") -> str:
        """Compile the fast path for any number of tokens, at best that of a micro-batch. Run this alone (see Gate).

        `who` is this target's name in the process. Return why what was compiled is not used, as `quicken` does.
        """
        fast = self._fast
        if fast is None:
            return ""
        fast.compile(alarm, who)
        fast.features(largest)
        reason = self._wanted.why_not(fast.features, fp8=self._fp8)
        self._fast = None if reason else fast
        return reason

    def features(self, tokens: TokenBatch, room_TD: Float[Tensor, "T D"] | None = None) -> Float[Tensor, "T D"]:
        """Return a micro-batch's features; the fast path writes them into `room_TD`, if given, and returns that."""
        return self._fast.features(tokens, room_TD) if self._fast else self.read(tokens)

    @torch.inference_mode()
    def read(self, tokens: TokenBatch) -> Float[Tensor, "T D"]:
        """Return the real tokens' features on the plain path, samples end to end; also of what is only tried at load.

        Padding is on the right, where causality hides it. Samples that share a row
        do not see one another: positions start anew with each, and from positions that do not go on (and no mask)
        transformers makes an attention mask of diagonal blocks. Padding is a sample a token.
        """
        ids_RS = _to(tokens.input_ids, self.device)
        places_T = _to(tokens.places_T, self._last)
        positions_RS, mask = None, None
        if tokens.packed:
            positions_RS = torch.zeros_like(ids_RS)
            positions_RS[0, : tokens.num_tokens] = context_positions(tokens.lengths).to(self.device)
            mask = self._samples_apart(positions_RS)
        with self._stages.through() if self._stages else nullcontext():
            try:
                self._trunk(ids_RS, attention_mask=mask, position_ids=positions_RS, use_cache=False)
            except BaseException:
                self._taps.forget()
                raise
            return self._taps.take().flatten(0, 1)[places_T]

    def stage(self, thread: threading.Thread) -> int:
        """Return which of its devices a thread computes on now, counted from 0; -1: on none, or all is on one."""
        return self._stages.at(thread) if self._stages else -1

    def where(self, thread: threading.Thread) -> str:
        """Return which layers a thread computes now, or failed at, and on which device; "" where all are on one."""
        return self._stages.where(thread) if self._stages else ""

    def _samples_apart(self, positions_1S: Int[Tensor, "1 S"]) -> Any:
        """Return a mask that keeps the samples of a row apart, None where transformers makes it of the positions.

        Architectures with eager attention only do not all hand it the positions (gpt-oss does not).
        """
        kinds, window = attention_kinds(self._trunk.config)
        if self._trunk.config._attn_implementation != "eager" or not set(kinds) <= set(ATTENTION):
            return None
        place_S = torch.arange(positions_1S.shape[1], device=self.device)
        start_S = place_S - positions_1S[0]
        seen_SS = (place_S <= place_S[:, None]) & (start_S == start_S[:, None])
        return biases(seen_SS[None, None], place_S[None], kinds, window, self._trunk.dtype)

    @torch.inference_mode()
    def captured_and_listed(self, ids: Sequence[int]) -> tuple[Float[Tensor, "T D"], Tensor]:
        """Return a sample's features, and the hidden states that transformers lists for the tapped layers."""
        with self._stages.through() if self._stages else nullcontext():
            out = self._trunk(torch.tensor([list(ids)], device=self.device), use_cache=False, output_hidden_states=True)
            listed = [out.hidden_states[tap + 1][0].to(self._last) for tap in self._which]
            return self._taps.take()[0], torch.cat(listed, dim=-1)


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy without waiting where that is safe: pinned memory is not given out again before the copy is done."""
    return tensor.to(device, non_blocking=tensor.is_pinned())


class DecodingTarget:
    """The whole target with a cache whose rows advance on their own.

    Without gradients but not in inference mode: torch.compile does not take the tensors that are made there.
    """

    def __init__(self, facts: TargetFacts, taps: Sequence[int], *, dtype: torch.dtype, device: str) -> None:
        check_taps(taps, facts)
        self.check(facts)
        model = load_causal(facts, dtype=dtype, device=device)
        plain = plain_logits(model)
        self._hold(model, taps, facts.eos_ids)
        check_decoding(self, plain, facts.name)

    @classmethod
    def check(cls, facts: TargetFacts) -> None:
        """Refuse a target that cannot be decoded with.

        Raises:
            UserError: see check_row_cache.
        """
        check_row_cache(load_config(facts.folder), facts.name)

    @classmethod
    def around(cls, model: Any, stop_ids: Sequence[int], taps: Sequence[int] = ()) -> "DecodingTarget":
        """Return a target made of a transformers model that is loaded already, and changes how it computes."""
        check_row_cache(model.config.get_text_config(), type(model).__name__)
        target = cls.__new__(cls)
        target._hold(model, taps, tuple(stop_ids))
        return target

    def _hold(self, model: Any, taps: Sequence[int], stop_ids: tuple[int, ...]) -> None:
        model.set_attn_implementation(attention.NAME)
        use_onednn(model)
        self.model, self.stop_ids, self.device = model, stop_ids, model.device
        config = model.config.get_text_config()
        self.max_positions: int = config.max_position_embeddings
        self.vocab_size: int = config.vocab_size
        self._cap = find_conventions(config, type(model).__name__).logit_cap
        self._kinds, self._window = attention_kinds(config)
        self._body = decoder_of(model)
        self._head = model.get_output_embeddings()
        self._taps = Taps(self._body.layers, taps)
        self._num_taps = len(taps)

    def new_cache(self, rows: int, slots: int) -> RowCache:
        """Return an empty cache of `rows` rows that hold `slots` tokens each."""
        return RowCache(rows, slots)

    @torch.no_grad()
    def prefill(
        self, ids_RT: Int[Tensor, "R T"], last_R: Int[Tensor, " R"], cache: RowCache, rows_R: Int[Tensor, " R"]
    ) -> tuple[Float[Tensor, "R V"], Float[Tensor, "R T D"] | None]:
        """Read right-padded prompts into any rows of the cache; return the logits at each prompt's last token, and the
        features of all tokens (None where no layer is tapped)."""
        cache.aim_at_start(rows_R)
        positions_RT = torch.arange(ids_RT.shape[1], device=self.device).expand_as(ids_RT)
        # By place, not by name: transformers renamed the cache argument in 5.24.
        hidden_RTH = self._body(ids_RT, self._prompt_bias(positions_RT[:1]), positions_RT, cache, use_cache=True)[0]
        logits_RV = self._logits(hidden_RTH[torch.arange(len(ids_RT), device=self.device), last_R])
        return logits_RV, self._taps.take() if self._num_taps else None

    @torch.no_grad()
    def forward(
        self,
        ids_RT: Int[Tensor, "R T"],
        positions_RT: Int[Tensor, "R T"],
        cache: RowCache,
        *,
        first_row: int,
        reach: int,
    ) -> tuple[Float[Tensor, "R T V"], Float[Tensor, "R T D"] | None]:
        """Write tokens at their positions of rows first_row.. and return logits and features.

        `reach` is how many cache slots are read (more than every position). Features are None where no layer is tapped.
        """
        seen_R1TS = cache.aim(first_row, positions_RT, reach)
        hidden_RTH = self._body(ids_RT, self._bias(seen_R1TS, positions_RT), positions_RT, cache, use_cache=True)[0]
        return self._logits(hidden_RTH), self._taps.take() if self._num_taps else None

    def _logits(self, hidden: Tensor) -> Tensor:
        return soft_cap(self._head(hidden), self._cap)

    def _bias(self, seen_R1TS: Bool[Tensor, "R 1 T S"], places_RT: Int[Tensor, "R T"]) -> Any:
        return biases(seen_R1TS, places_RT, self._kinds, self._window, self.model.dtype)

    def _prompt_bias(self, positions_1T: Int[Tensor, "1 T"]) -> Any:
        """Return `_bias` of a prompt that reads itself; None, which is faster, where no window is shorter than it."""
        width = positions_1T.shape[1]
        if self._kinds == ("full_attention",) or width <= self._window:
            return None
        return self._bias((positions_1T[0] <= positions_1T[0, :, None])[None, None], positions_1T)


def biases(
    seen_R1TS: Bool[Tensor, "R 1 T S"],
    places_RT: Int[Tensor, "R T"],
    kinds: Sequence[str],
    window: int,
    dtype: torch.dtype,
) -> Any:
    """Return what is added to the scores of tokens at these places: a tensor where all layers are of one kind, else one
    for each kind, as transformers takes them. Made once for all layers, and not from truth values in each."""
    made: dict[str, Tensor] = {}
    for kind in kinds:
        seen = seen_R1TS
        if kind == "sliding_attention":  # the window counts the token that looks
            slot_S = torch.arange(seen.shape[-1], device=seen.device)
            seen = seen & (slot_S > places_RT[:, None, :, None] - window)
        made[kind] = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -torch.inf)
    return made if len(made) > 1 else next(iter(made.values()))


def attention_kinds(config: Any) -> tuple[tuple[str, ...], int]:
    """Return the kinds of a decoder's attention layers, and how many tokens a sliding one sees (0: there is none)."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = set(getattr(config, "layer_types", None) or [ATTENTION[1] if window else ATTENTION[0]])
    return tuple(sorted(kinds)), window or 0


def check_row_cache(config: Any, name: str) -> None:
    """Refuse what the row cache cannot do.

    Raises:
        UserError: some layer is not attention, or the rotary embedding depends on the longest row of a batch.
    """
    kinds, window = attention_kinds(config)
    others = [kind for kind in kinds if kind not in ATTENTION or (kind == "sliding_attention" and not window)]
    if others:
        raise UserError(
            f"Target {name} has layers that are not attention over keys and values by position ({', '.join(others)}), "
            "whose state cannot be taken back when drafts are rejected: decoding with it is not supported. Let a "
            "server decode (--server), or use another target."
        )
    kind, limit = rope_of_batch(config)
    if limit:
        advice = "Use a target whose rope_type is default, linear, llama3 or yarn."
        if kind == "dynamic":  # plain up to the limit
            advice = f"For texts up to {limit:,} tokens set it to default in a copy of the target."
        raise UserError(
            f"Target {name} has rope_parameters.rope_type {kind} in config.json, which turns all rows of a batch by "
            f"other angles once one is longer than {limit:,} tokens: decoding with it is not supported yet. {advice}"
        )
