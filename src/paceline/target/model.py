"""The frozen target as a source of features, alone (training) or together with logits (decoding).

A tap is the output of a decoder layer, before the next layer and before the final norm: what transformers lists as
`hidden_states[layer + 1]`. A token's feature is its m taps side by side, in ascending order of layers.

Shapes: R rows, S padded length, T real tokens (training) or tokens of a row (decoding), D = m * H, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from paceline.blocks import context_positions
from paceline.records import TokenBatch, UserError
from paceline.runtime.linear import use_onednn
from paceline.target import attention
from paceline.target.cache import RowCache
from paceline.target.load import TargetFacts, load_causal, load_config, load_trunk


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
    """Forward hooks that keep the tapped layers' outputs of the running forward."""

    def __init__(self, layers: nn.ModuleList, taps: Sequence[int]) -> None:
        self._outputs: list[Tensor] = []
        for tap in taps:
            layers[tap].register_forward_hook(self._keep)

    def _keep(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._outputs.append(output[0] if isinstance(output, tuple) else output)

    def take(self) -> Float[Tensor, "R S D"]:
        """Return the features of the forward that just ran and forget them."""
        features = torch.cat(self._outputs, dim=-1)
        self._outputs.clear()
        return features

    def forget(self) -> None:
        """Forget what a forward that failed has left."""
        self._outputs.clear()


class FeatureTarget:
    """The target up to its deepest tap; it never computes logits."""

    def __init__(
        self,
        facts: TargetFacts,
        taps: Sequence[int],
        *,
        dtype: torch.dtype,
        device: str,
        on_loaded: Callable[[float], None] = lambda share: None,
    ) -> None:
        """Load it; see load_trunk."""
        check_taps(taps, facts)
        self.device = torch.device(device)
        self._trunk = load_trunk(facts, max(taps), dtype=dtype, device=device, on_loaded=on_loaded)
        self._taps = Taps(self._trunk.layers, taps)

    @torch.inference_mode()
    def features(self, tokens: TokenBatch) -> Float[Tensor, "T D"]:
        """Return the real tokens' features, samples end to end. Padding is on the right, where causality hides it.

        Samples that share a row do not see one another: positions start anew with each, and from positions that do not
        go on (and no mask) transformers makes an attention mask of diagonal blocks. Padding is a sample a token.
        """
        ids_RS = _to(tokens.input_ids, self.device)
        places_T = _to(tokens.places_T, self.device)
        positions_RS = None
        if tokens.packed:
            positions_RS = torch.zeros_like(ids_RS)
            positions_RS[0, : tokens.num_tokens] = context_positions(tokens.lengths).to(self.device)
        try:
            self._trunk(ids_RS, position_ids=positions_RS, use_cache=False)
        except BaseException:
            self._taps.forget()
            raise
        return self._taps.take().flatten(0, 1)[places_T]


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
        self._hold(load_causal(facts, dtype=dtype, device=device), taps, facts.eos_ids)

    @classmethod
    def check(cls, facts: TargetFacts) -> None:
        """Refuse a target that cannot be decoded with.

        Raises:
            UserError: see check_plain_attention.
        """
        check_plain_attention(load_config(facts.folder), facts.name)

    @classmethod
    def around(cls, model: Any, stop_ids: Sequence[int], taps: Sequence[int] = ()) -> "DecodingTarget":
        """Return a target made of a transformers model that is loaded already, and changes how it computes."""
        check_plain_attention(model.config.get_text_config(), type(model).__name__)
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
        self._body = getattr(model, model.base_model_prefix)
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
        hidden_RTH = self._body(ids_RT, None, positions_RT, cache, use_cache=True)[0]
        logits_RV = self.model.lm_head(hidden_RTH[torch.arange(len(ids_RT), device=self.device), last_R])
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
        # Made once here, and not from a mask of truth values in every layer.
        bias_R1TS = torch.zeros_like(seen_R1TS, dtype=self.model.dtype).masked_fill(~seen_R1TS, -torch.inf)
        hidden_RTH = self._body(ids_RT, bias_R1TS, positions_RT, cache, use_cache=True)[0]
        return self.model.lm_head(hidden_RTH), self._taps.take() if self._num_taps else None


def check_plain_attention(config: Any, name: str) -> None:
    """Refuse what the row cache cannot do.

    Raises:
        UserError: some layer is not full attention, or the rotary embedding depends on the longest row of a batch.
    """
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds != {"full_attention"} or window:
        raise UserError(
            f"Target {name} has layers that are not plain full attention ({sorted(kinds)}, sliding_window "
            f"{window}); decoding with it is not supported yet."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        advice = "Use a target whose rope_type is default, linear, llama3 or yarn."
        if kind == "dynamic":  # plain up to the limit
            advice = f"For texts up to {limit:,} tokens set it to default in a copy of the target."
        raise UserError(
            f"Target {name} has rope_parameters.rope_type {kind} in config.json, which turns all rows of a batch by "
            f"other angles once one is longer than {limit:,} tokens: decoding with it is not supported yet. {advice}"
        )
