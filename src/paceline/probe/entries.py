"""The doctor's table of contents: every probe, what it needs, what it means for a run, and what to do about it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from paceline.probe import expected
from paceline.probe.expected import Version

Needs = Literal["cpu", "cuda", "cuda pair"]

_GATE = "Nothing to do: paceline holds every other role at a gate while one compiles or captures."
_GENERATOR = "Nothing to do: every role of paceline draws from a generator of its own."
_NO_MODE = "Nothing to do: paceline compiles without a named mode and captures by hand."
_CAPTURED = (
    "Nothing to do: `train` runs compiled steps, which are as right but slower where a step is short. Report it."
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One probe. Its function is named, not imported, so that the doctor starts where torch cannot be loaded."""

    name: str
    function: str  # module of this package, a colon, function
    needs: Needs
    limit_s: int  # the process is ended after so many seconds without this probe's answer
    meaning: str  # of any verdict but ok, for a run; of every verdict where the entry is a hazard
    remedy: str
    arguments: tuple[str, ...] = ()
    group: str = ""  # probes of a group follow one another in one process
    harmless: bool = False  # also on a GPU: what goes wrong leaves CUDA usable for the next probe
    hazard: bool = False  # paceline never does this: a crash is ok, and what it means is told in any case
    expected: Callable[[Version, bool], str | None] = expected.nothing
    others: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # verdict → another meaning and remedy


def _mode(mode: str, *, graphs: bool) -> Entry:
    return Entry(
        f"mode-{mode}",
        "compile:named_mode",
        "cpu",
        180,
        "A run loses nothing: no policy uses a named mode.",
        _NO_MODE,
        arguments=(mode,),
        group="compile",
        harmless=not graphs,
        expected=expected.mode_with_graphs if graphs else expected.mode_without_graphs,
    )


def _capture(name: str, function: str, meaning: str, remedy: str = _CAPTURED, *, hazard: bool = False) -> Entry:
    return Entry(name, f"capture:{function}", "cuda", 120, meaning, remedy, hazard=hazard)


ENTRIES: tuple[Entry, ...] = (
    # The machine
    Entry(
        "torch",
        "machine:torch_and_gpus",
        "cpu",
        120,
        "A run cannot use the GPUs, or not all of them.",
        "Install a torch that is built for this GPU and driver, or name working devices in CUDA_VISIBLE_DEVICES.",
        harmless=True,
    ),
    Entry(
        "cores-and-memory",
        "machine:cores_and_memory",
        "cpu",
        20,
        "Roles share the cores, and a target has to fit into memory while it loads: a run is slow or is killed.",
        "Give the machine or its container two cores and 4 GiB at least, or use a smaller target.",
        group="machine",
        harmless=True,
    ),
    Entry(
        "limits",
        "machine:limits_and_settings",
        "cpu",
        20,
        "A run with many shards or roles may end with `too many open files`.",
        "Raise the limit before the run: `ulimit -n 65536`.",
        group="machine",
        harmless=True,
    ),
    Entry(
        "compiler",
        "machine:compiler",
        "cpu",
        120,
        "Inductor and Triton cannot build what they generate, so a run stays eager.",
        "Install a C++ compiler and Python's headers; Debian, Ubuntu: `apt-get install g++ python3-dev`.",
        group="machine",
        harmless=True,
    ),
    Entry(
        "python-modules",
        "machine:python_modules",
        "cpu",
        120,
        "Every start takes some seconds longer, and so does each process that a benchmark or a probe starts.",
        "Unset PYTHONDONTWRITEBYTECODE, and name a folder that can be written in PYTHONPYCACHEPREFIX; in a container's "
        "image, run `python -m compileall` on site-packages.",
        group="machine",
        harmless=True,
    ),
    Entry(
        "disk",
        "machine:disk",
        "cpu",
        120,
        "Datasets, checkpoints and the cache go there: a run waits for the disk, or ends when it is full.",
        "Free some room, or use another disk: PACELINE_CACHE moves the cache, `run_dir` a run, TMPDIR temporary files.",
        group="machine",
        harmless=True,
    ),
    Entry(
        "ports",
        "machine:ports",
        "cpu",
        60,
        "A run in one process needs no port; torch.distributed and tools that are watched over a port do.",
        "Allow connections to 127.0.0.1 in the firewall or sandbox.",
        group="machine",
        harmless=True,
    ),
    Entry(
        "gpu-memory",
        "machine:gpu_memory",
        "cuda",
        120,
        "Others use these GPUs: a run may find too little memory, and its speed varies.",
        "End the other processes (`nvidia-smi` lists them), or name free GPUs in CUDA_VISIBLE_DEVICES.",
        harmless=True,
    ),
    Entry(
        "rates",
        "rates:products_and_copies",
        "cuda",
        120,
        "No split of these GPUs can be predicted (`paceline plan --gpus`), or none with fp8; a run loses nothing.",
        "Free the GPUs and run the doctor again; where fp8 fails, leave it off.",
        harmless=True,
    ),
    # Compiling
    Entry(
        "compile-main",
        "compile:in_main_thread",
        "cpu",
        120,
        "torch.compile does not work in this installation at all, so a run stays eager.",
        "See the probe `compiler`; without a flaw there, install matching versions of torch and Triton.",
        group="compile",
        harmless=True,
    ),
    Entry(
        "compile-worker",
        "compile:in_worker_thread",
        "cpu",
        120,
        "Every role is a thread, so a run stays eager: slower, and otherwise the same.",
        "See `compile-main`; if that is ok, use another version of torch.",
        group="compile",
        harmless=True,
    ),
    Entry(
        "compile-two-threads",
        "compile:two_threads",
        "cpu",
        180,
        "Two drafters must not compile at the same time. A run does not: the gate lets one compile after the other.",
        _GATE,
        group="compile",
        harmless=True,
    ),
    _mode("default", graphs=False),
    _mode("max-autotune-no-cudagraphs", graphs=False),
    _mode("reduce-overhead", graphs=True),
    _mode("max-autotune", graphs=True),
    # What threads do to one another
    Entry(
        "graph-trees-in-worker",
        "hazards:graph_trees_state",
        "cpu",
        90,
        "Up to torch 2.12 modes with CUDA graphs fail in every thread but the one that first imported graph trees.",
        _NO_MODE,
        group="hazards",
        harmless=True,
        hazard=True,
        expected=expected.graph_trees,
    ),
    Entry(
        "settings-in-threads",
        "hazards:settings_in_threads",
        "cpu",
        90,
        "Settings of dynamo and inductor that are made in one thread do not reach the drafters' threads.",
        "Nothing to do: paceline gives them to torch.compile itself. TORCHINDUCTOR_* variables reach all threads.",
        group="hazards",
        harmless=True,
        expected=expected.settings,
    ),
    Entry(
        "is-compiling",
        "hazards:is_compiling_elsewhere",
        "cpu",
        90,
        "Where the flag leaks, an eager optimizer in one thread may fail or lose its last bits while another compiles.",
        _GATE,
        group="hazards",
        harmless=True,
        hazard=True,
        expected=expected.is_compiling,
    ),
    Entry(
        "modules-while-tracing",
        "hazards:modules_while_tracing",
        "cpu",
        90,
        "A target cannot run a module while a drafter's thread traces.",
        _GATE,
        group="hazards",
        harmless=True,
        hazard=True,
        expected=expected.modules,
    ),
    Entry(
        "reset-under-warm-code",
        "hazards:reset_under_warm_code",
        "cpu",
        90,
        "torch.compiler.reset() may crash the process while another thread is in compiled code.",
        "Nothing to do: paceline never resets while roles run. Code of your own beside it must not either.",
        hazard=True,
    ),
    # Capturing
    _capture("capture-worker", "compiled_step", "A step cannot be captured in a drafter's thread."),
    _capture("replay-equals-eager", "eager_step", "A captured step computes other bits than the step it was made of."),
    _capture("capture-while-allocating", "while_allocating", "A capture fails beside a target on the same GPU."),
    _capture("capture-while-drawing", "while_drawing_own", "A capture fails beside a role that draws random numbers."),
    _capture(
        "capture-while-drawing-default",
        "while_drawing_default",
        "A thread that draws from the device's default generator during a capture may fail.",
        _GENERATOR,
        hazard=True,
    ),
    # Numbers
    Entry(
        "fp8",
        "products8:step_and_target",
        "cuda",
        180,
        "With `auto`, `train.fp8` and `target.fp8` are off on the GPUs named; a run loses nothing else.",
        "Leave them on `auto` or `off`; report what was observed.",
    ),
    # Attention
    Entry(
        "flex-attention",
        "attention:flex_attention_both_ways",
        "cpu",
        180,
        "Training takes the dense mask on this device, whose cost grows with anchors times context.",
        "Nothing to do on a CPU, which has no backward of it up to torch 2.14; keep `train.anchor_slots` moderate.",
        expected=expected.flex_attention,
        others={
            "refused": (
                "Training takes the dense mask, whose cost grows with anchors times context.",
                "Keep `train.anchor_slots` moderate; where `compile-worker` is ok, report what was observed.",
            )
        },
    ),
    # Several GPUs
    Entry(
        "peer-copies",
        "peers:copies_between_all_pairs",
        "cuda pair",
        180,
        "Features travel from targets to drafters through host memory, or not at all between the pairs named.",
        "Put targets and drafters on GPUs with direct access (`nvidia-smi topo -m`), or colocate them.",
    ),
    Entry(
        "nccl",
        "peers:sum_over_all",
        "cuda pair",
        120,
        "Several drafter ranks cannot average their gradients in one process.",
        "Use one drafter; for the cause run with NCCL_DEBUG=INFO.",
        others={"hung": ("Several drafter ranks would hang.", "Use one drafter; try NCCL_P2P_DISABLE=1.")},
    ),
    Entry(
        "capture-two-gpus",
        "pairs:capture_at_once",
        "cuda pair",
        120,
        "Two drafters must not capture at the same time. A run does not: the gate lets one capture after the other.",
        _GATE,
    ),
    Entry(
        "shared-compile",
        "pairs:one_compile",
        "cuda pair",
        180,
        "Each drafter rank compiles for its own GPU, so several take longer to start; their steps lose nothing.",
        "Nothing to do: a restart finds the code in the cache.",
        others={
            "refused": (
                "What one drafter rank compiles fails beside another one, so a run with several may end at its start.",
                "Use one drafter, or `train.policy: eager`; and report what was observed.",
            )
        },
    ),
)

BY_NAME = {entry.name: entry for entry in ENTRIES}
