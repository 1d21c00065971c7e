"""The probe of products in fp8: a drafter's whole step and a target's product, each held against plain code.

Shapes: T tokens, N outputs, K inputs.
"""

from functools import partial

import torch

from paceline.config import DrafterSettings, TrainSettings
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.probe.finding import Bench, Finding, tell
from paceline.probe.nets import devices, use
from paceline.probe.threads import in_worker
from paceline.runtime.compiling import Policy, warm_compiler
from paceline.runtime.devices import device_name
from paceline.target.products import NEEDED8, Matrix, has_fp8, in_fp8, product
from paceline.train.step import DrafterStep

HIDDEN, VOCABULARY = 1024, 20_016
DRAFTER = DrafterSettings(
    block_size=16,
    layers=3,
    taps=(1, 2),
    mask_token_id=3,
    heads=8,
    kv_heads=2,
    head_dim=128,
    intermediate_size=2048,
    rope_theta=1e6,
)
TRAIN = TrainSettings(context_slots=2048, anchor_slots=128, anchors_per_sample=64, fp8="on")
T, N, K = 512, 1024, 2048
CLOSE = 0.06  # of the product's size: rounding both operands to e4m3 makes 0.04
POLICIES: tuple[Policy, ...] = ("compiled", "captured")


def step_and_target(bench: Bench) -> Finding:
    """In a worker thread, run a target's product and a compiled and a captured step in fp8 on each kind of GPU."""
    works, why, flaws = dict[str, bool](), dict[str, str](), 0
    for device in devices(bench):
        name = device_name(device)
        if not has_fp8(device):  # no fault of it
            major, minor = torch.cuda.get_device_capability(device)
            works[name] = False
            why[name] = f"compute capability {major}.{minor}, and fp8 needs {NEEDED8[0]}.{NEEDED8[1]}"
            continue
        warm_compiler(str(device))
        said = in_worker(partial(tried, device))
        works[name] = not said
        why[name] = said or "a target's product, a compiled and a captured step in fp8 give right values"
        flaws += bool(said)
    observed = "; ".join(f"{name}: {text}" for name, text in why.items())
    return Finding("refused" if flaws else "ok", observed, {"works": works, "why": why})


def tried(device: torch.device, policies: tuple[Policy, ...] = POLICIES) -> str:
    """Return what failed first on a device, an empty text if nothing did."""
    use(device)
    what = "a target's product in fp8"
    try:
        if not (apart := product_apart(device)) <= CLOSE:
            return f"{what} is off by {apart:.2f} of its size, {CLOSE} is allowed"
        for policy in policies:
            what = f"a {policy} step in fp8"
            step_of(device, policy).warm()  # which holds it against plain code
    except Exception as error:
        return f"{what}: {tell(error)}"
    return ""


def product_apart(device: torch.device) -> float:
    """Return how far a product in fp8 is from that in float32, relative to its size."""
    source = torch.Generator().manual_seed(0)
    x_TK = torch.randn(T, K, generator=source).to(device, torch.bfloat16)
    weight_NK = torch.randn(N, K, generator=source).to(device, torch.bfloat16)
    made_TN = product(x_TK, in_fp8(Matrix(weight_NK, None, None))).double()
    wanted_TN = x_TK.double() @ weight_NK.double().T
    return float((made_TN - wanted_TN).norm() / wanted_TN.norm())


def step_of(
    device: torch.device, policy: Policy, drafter: DrafterSettings = DRAFTER, train: TrainSettings = TRAIN
) -> DrafterStep:
    """Return the step of a drafter with random weights."""
    source = torch.Generator().manual_seed(1)
    wire = torch.bfloat16 if train.dtype == "bfloat16" else torch.float32
    embed_VH = (torch.randn(VOCABULARY, HIDDEN, generator=source) * 0.03).to(device, wire)
    model = Drafter(drafter, HIDDEN).initialise(0).to(device)
    return DrafterStep(model, FrozenEnds(embed_VH, embed_VH), train, policy=policy)
