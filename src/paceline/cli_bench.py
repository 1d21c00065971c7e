"""The commands of `paceline bench`."""

from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import typer

from paceline.cli_options import AsJson, Device, Number, check_captured, choose_device, finish, refuse_idle
from paceline.observe.console import Console
from paceline.records import UserError

Policy = Literal["eager", "compiled", "captured"]
Peer = Literal["specforge", "speculators"]
TargetPath = Literal["plain", "fast", "compiled", "fp8"]
StepShape = Literal["tiny", "tiny-2x128", "small", "qwen3-4b", "qwen3-8b", "qwen3-8b-2x3072", "qwen3-8b-8x550"]
bench = typer.Typer(help="Measure a part of paceline on this machine.", no_args_is_help=True)


@bench.command("data")
def bench_data(
    rows: Annotated[int, typer.Option(min=20_000, help="Short rows that are prepared to watch memory.")] = 1_000_000,
    target: Annotated[str | None, typer.Option(help="Folder with a tokenizer. Default: the demo's target.")] = None,
    work: Annotated[Path | None, typer.Option(help="Where to put temporary files.")] = None,
    json: AsJson = False,
) -> None:
    """Data plane: opening, planning, padding, loading and preparing datasets."""
    from paceline.bench.data import bench_data as measure

    console = Console(json=json)
    finish(console, json, measure(console=console, rows=rows, target=target, work=work), "")


@bench.command("step")
def bench_step(
    shape: Annotated[StepShape, typer.Option(help="Which drafter, and for NxT, which samples.")] = "small",
    policy: Annotated[
        list[str] | None, typer.Option(metavar="eager|compiled|captured", help="How it runs; several: in this order.")
    ] = None,
    device: Device = None,
    dtype: Annotated[Number, typer.Option(help="Number format of matrix products.")] = "bfloat16",
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="specforge|speculators", help="Measure its training module, too; several: in this order."),
    ] = None,
    optimizer_state: Annotated[
        Literal["fp32-master", "bf16"],
        typer.Option(help="AdamW with float32 weights and moments, or with all of them in bfloat16; ours and peers'."),
    ] = "fp32-master",
    clip: Annotated[bool, typer.Option(help="Clip gradients by their norm; ours and peers'.")] = True,
    fp8: Annotated[
        bool, typer.Option("--fp8", help="Products of our layers in fp8, as train.fp8; peers have none.")
    ] = (False),
    recompute: Annotated[
        Literal["off", "layers"], typer.Option(help="Layers again in backward, as train.recompute; ours alone.")
    ] = "off",
    moments: Annotated[
        Literal["float32", "8bit"], typer.Option(help="Of AdamW, as train.moments; ours alone.")
    ] = "float32",
    offload: Annotated[
        Literal["off", "moments"], typer.Option(help="Moments in host memory, as train.offload; ours alone.")
    ] = "off",
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = 500,
    noise: Annotated[int, typer.Option(min=0, help="Threads that run forwards of a small model beside ours.")] = 0,
    hog: Annotated[bool, typer.Option("--hog", help="A thread beside ours that holds the interpreter.")] = False,
    json: AsJson = False,
) -> None:
    """The drafter's step under each policy, in a worker thread as in a run, and peers' beside it."""
    for name, given, known in (("--policy", policy, get_args(Policy)), ("--peer", peer, get_args(Peer))):
        unknown = sorted(set(given or []) - set(known))
        if unknown:
            raise UserError(f"{name} is one of {', '.join(known)}, got {unknown[0]!r}.")
    if peer:
        beside_ours = {"--noise": noise or None, "--hog": hog}
        refuse_idle("--peer", "measures both sides with nothing beside them", beside_ours)
    where = choose_device(device)
    from paceline.bench.shapes import SHAPES
    from paceline.bench.step import bench_step as measure
    from paceline.bench.work import Work

    console = Console(json=json)
    all_here = get_args(Policy) if where.startswith("cuda") else ("eager", "compiled")
    all_here = tuple(name for name in all_here if name != "eager" or not fp8)
    policies = cast(tuple[Policy, ...], tuple(policy or all_here))
    beside = (noise, hog, optimizer_state, clip)
    work = Work(SHAPES[shape], where, dtype, steps, *beside, fp8, recompute, moments, offload)
    finish(console, json, measure(work, policies, console, cast(tuple[Peer, ...], tuple(peer or ()))), "")


@bench.command("target")
def bench_target(
    shape: Annotated[Literal["tiny", "qwen3-8b"], typer.Option(help="Which target; its weights are random.")] = "tiny",
    layout: Annotated[
        Literal["bucketed", "trimmed", "packed"], typer.Option(help="How the loader lays samples out, as data.layout.")
    ] = "trimmed",
    path: Annotated[
        list[str] | None,
        typer.Option(metavar="plain|fast|compiled|fp8", help="How ours runs; several. Default: all but fp8."),
    ] = None,
    device: Device = None,
    dtype: Annotated[Number | None, typer.Option(help="Default: float32 on a CPU, bfloat16 on a GPU.")] = None,
    budget: Annotated[int, typer.Option(min=64, help="Tokens of a batch, padding included.")] = 16_384,
    tokens: Annotated[int, typer.Option(min=1, help="Real tokens that are read at least, in whole batches.")] = 131_072,
    passes: Annotated[int, typer.Option(min=1, help="Over all of them; the median counts.")] = 3,
    stock_compiled: Annotated[
        bool | None, typer.Option(help="Also the stock forward with compiled layers. Default: on a GPU.")
    ] = None,
    json: AsJson = False,
) -> None:
    """The target's features: real tokens/s, against a stock transformers forward on the same samples."""
    unknown = sorted(set(path or []) - set(get_args(TargetPath)))
    if unknown:
        raise UserError(f"--path is one of {', '.join(get_args(TargetPath))}, got {unknown[0]!r}.")
    where = choose_device(device)
    gpu = where.startswith("cuda")
    from paceline.bench.target import TargetWork
    from paceline.bench.target import bench_target as measure
    from paceline.bench.target_shapes import TARGET_SHAPES

    work = TargetWork(
        shape=TARGET_SHAPES[shape],
        device=where,
        dtype=dtype or ("bfloat16" if gpu else "float32"),
        layout=layout,
        budget=budget,
        tokens=tokens,
        passes=passes,
        paths=cast(tuple[TargetPath, ...], tuple(path or ("plain", "fast", "compiled"))),
        stock_compiled=gpu if stock_compiled is None else stock_compiled,
    )
    console = Console(json=json)
    finish(console, json, measure(work, console), "")


@bench.command("pipeline")
def bench_pipeline(
    shape: Annotated[
        Literal["tiny", "qwen3-8b"] | None, typer.Option(help="Target and drafter. Default: qwen3-8b, on a CPU tiny.")
    ] = None,
    targets: Annotated[
        str | None, typer.Option(help="Devices of target replicas, by commas. Default: one, a GPU if there is one.")
    ] = None,
    drafters: Annotated[
        str | None, typer.Option(help="Devices of drafter ranks, by commas. Default: the targets'.")
    ] = None,
    policy: Annotated[Policy | None, typer.Option(help="How the step runs. Default: captured, on a CPU eager.")] = None,
    dtype: Annotated[Number | None, typer.Option(help="Default: float32 on a CPU, bfloat16 on a GPU.")] = None,
    steps: Annotated[int, typer.Option(min=8, help="Steps that are timed, behind warm-up.")] = 24,
    batches_per_step: Annotated[
        int | None, typer.Option(min=1, help="Micro-batches of a step. Default: one for every drafter rank.")
    ] = None,
    fp8: Annotated[bool, typer.Option("--fp8", help="Products of both in fp8, as target.fp8 and train.fp8.")] = False,
    stand_ins: Annotated[
        bool, typer.Option("--stand-ins", help="Roles that sleep in place of target and step: the pipeline alone.")
    ] = False,
    json: AsJson = False,
) -> None:
    """A whole run with random weights: samples/s, against both of its sides alone."""
    if stand_ins:
        of_models = {"--shape": shape, "--policy": policy, "--dtype": dtype, "--batches-per-step": batches_per_step}
        refuse_idle("--stand-ins", "measures roles that compute nothing", {**of_models, "--fp8": fp8})
    console = Console(json=json)
    here = [choose_device(None)] if targets is None else targets.split(",")
    there = here if drafters is None else drafters.split(",")
    named = [(name, "--targets") for name in here] + [(name, "--drafters") for name in there]
    devices = [choose_device(name, option) for name, option in named]
    from paceline.recipes.bench_pipeline import bench_pipeline as measure
    from paceline.recipes.bench_pipeline import bench_stand_ins

    if stand_ins:
        rows = bench_stand_ins(console, targets=len(here), drafters=len(there), count=4 * steps)
        finish(console, json, rows, "")
        return
    from paceline.bench.pipeline import PipelineWork

    gpu = all(name.startswith("cuda") for name in devices)
    if policy == "captured" and not all(name.startswith("cuda") for name in there):
        raise UserError(
            f"--policy captured needs GPUs for drafters (--drafters), got {', '.join(there)}. Leave it out, or ask for "
            "compiled or eager."
        )
    if fp8 and (not gpu or dtype == "float32" or policy == "eager"):
        where = ", ".join(dict.fromkeys(devices))
        raise UserError(
            f"--fp8 takes GPUs, --dtype bfloat16 and --policy compiled or captured, got {where}, "
            f"{dtype or 'bfloat16'} and {policy or 'captured'}. Change them, or leave it out."
        )
    work = PipelineWork(
        name=shape or ("qwen3-8b" if gpu else "tiny"),
        targets=tuple(here),
        drafters=tuple(there),
        dtype=dtype or ("bfloat16" if gpu else "float32"),
        policy=policy or ("captured" if gpu else "eager"),
        steps=steps,
        fp8=fp8,
        batches_per_step=batches_per_step,
    )
    finish(console, json, measure(work, console), "")


@bench.command("generate")
def bench_generate(
    shape: Annotated[Literal["smollm2", "qwen3-8b"], typer.Option(help="Which target; its weights are random.")] = (
        "smollm2"
    ),
    device: Device = None,
    dtype: Annotated[Number | None, typer.Option(help="Default: float32 on a CPU, bfloat16 on a GPU.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows decoded at once. Default: by shape and device.")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Default: as many as rows.")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Of every completion. Default: 128, qwen3-8b 512.")] = None,
    sampled: Annotated[bool, typer.Option("--sampled", help="Temperature 0.6, top-k 20, top-p 0.95; not greedy.")] = (
        False
    ),
    captured: Annotated[bool | None, typer.Option(help="CUDA graphs. Default: on a GPU.")] = None,
    compiled: Annotated[bool, typer.Option("--compiled", help="Fuse the step with torch.compile.")] = False,
    against: Annotated[
        int | None, typer.Option(min=0, help="Batch of transformers' generate; 0: without. Default: 8, on a GPU rows.")
    ] = None,
    continuous: Annotated[bool, typer.Option("--continuous", help="Also measure transformers' generate_batch.")] = (
        False
    ),
    json: AsJson = False,
) -> None:
    """The decoding engine: tokens/s, against transformers' generate and against what memory allows."""
    if continuous:
        refuse_idle("--continuous", "measures generate_batch with greedy decoding", {"--sampled": sampled})
    where = choose_device(device)
    check_captured(captured, where)
    gpu = where.startswith("cuda")
    from paceline.bench.generate import Work
    from paceline.bench.generate import bench_generate as measure

    count = rows or (64 if not gpu else 1024 if shape == "smollm2" else 256)
    asked = prompts or count
    batch = (count if gpu else 8) if against is None else against
    work = Work(
        shape=shape,
        device=where,
        dtype=dtype or ("bfloat16" if gpu else "float32"),
        rows=count,
        prompts=asked,
        tokens=tokens or (128 if shape == "smollm2" else 512),
        sampled=sampled,
        captured=gpu if captured is None else captured,
        compiled=compiled,
        against_batch=min(batch, asked),
        continuous=continuous,
    )
    console = Console(json=json)
    result = measure(work, console)
    finish(console, json, result, "\n".join(f"  {key} {value}" for key, value in result.items()))


@bench.command("decode")
def bench_decode(
    run: Annotated[Path | None, typer.Option(help="A run's drafter and its target. Default: random weights.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSONL file of prompts for --run.")] = None,
    shape: Annotated[
        Literal["smollm2", "qwen3-8b"] | None,
        typer.Option(help="Which random weights, without --run. Default: smollm2."),
    ] = None,
    right: Annotated[
        bool, typer.Option("--right", help="With random weights: every draft is right, not none.")
    ] = False,
    device: Device = None,
    dtype: Annotated[Number | None, typer.Option(help="Default: float32 on a CPU, bfloat16 on a GPU.")] = None,
    count: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 4,
    tokens: Annotated[int | None, typer.Option(min=2, help="Of an answer at most. Default: 64, on a GPU 512.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Medians are over these.")] = 5,
    captured: Annotated[bool | None, typer.Option(help="CUDA graphs. Default: on a GPU.")] = None,
    json: AsJson = False,
) -> None:
    """Speculative decoding one prompt at a time: tokens/s, against plain decoding and the dflash package's own loop."""
    if (run is None) != (prompts is None):
        missing, given = ("--prompts", "--run") if prompts is None else ("--run", "--prompts")
        raise UserError(f"--run and --prompts go together, got {given} alone. Add {missing}.")
    if run is not None:
        refuse_idle("--run", "measures that run's own weights", {"--shape": shape, "--right": right})
    where = choose_device(device)
    check_captured(captured, where)
    gpu = where.startswith("cuda")
    from paceline.bench.decode import Work
    from paceline.bench.decode import bench_decode as measure

    work = Work(
        shape=(shape or "smollm2") if run is None else str(run),
        right=right,
        prompt_file=prompts,
        device=where,
        dtype=dtype or ("bfloat16" if gpu else "float32"),
        prompts=count,
        tokens=tokens or (512 if gpu else 64),
        repeats=repeats,
        captured=gpu if captured is None else captured,
    )
    console = Console(json=json)
    result = measure(work, console)
    finish(console, json, result, "\n".join(f"  {key} {value}" for key, value in result.items()))


@bench.command("report")
def bench_report(
    steps: Annotated[int, typer.Option(min=1, help="Steps of the made-up run, each of them logged.")] = 100_000,
    opens: Annotated[int, typer.Option(min=1, help="How often a browser opens the page; the median counts.")] = 3,
    json: AsJson = False,
) -> None:
    """The report of a long run: making the page, and opening it in Chromium where there is one."""
    from paceline.bench.report import bench_report as measure

    console = Console(json=json)
    result = measure(steps=steps, opens=opens, console=console)
    finish(console, json, result, "\n".join(f"  {key} {value}" for key, value in result.items()))
