"""Days with a GPU and their steps: the question of each, its command, and the seconds that it may take.

Steps run by turns (day.py): those that others depend on; those that ask for correctness, many at a time on
one GPU; at last those that measure time, each with the GPU alone. In each turn the most valuable come first.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


class Turn(enum.Enum):
    """Place of a step in a day."""

    FIRST = "first"
    TOGETHER = "together"
    ALONE = "alone"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A command that answers a question in processes of its own.

    Attributes:
        words: after `python`. A module of this package leaves a result (results.py); tests do not.
        usual_s: without which it is not begun.
        most_s: after which it is killed.
        of: step whose digests its own must equal.
        after: step of the first turn without which it is not begun.
        rehearsed: other words, for a machine without a GPU.
    """

    name: str
    question: str
    words: tuple[str, ...]
    usual_s: float
    most_s: float
    turn: Turn = Turn.TOGETHER
    of: str = ""
    after: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    rehearsed: tuple[str, ...] = ()

    @property
    def is_tests(self) -> bool:
        """True for a run of pytest."""
        return self.words[:2] == ("-m", "pytest")


@dataclass(frozen=True, kw_only=True, slots=True)
class Day:
    """Steps that fit into one loan of a machine.

    Attributes:
        budget_s: of the steps; a loan is `LOAN_S` longer.
        together: most steps at a time in the second turn. Over NCCL ranks wait for each other's kernels, and
            the GPU gives each process its share of time, so these are few.
        carries: folders of `.gpu` that it takes to a machine without a network.
    """

    name: str
    shows: str
    budget_s: int
    steps: tuple[Step, ...]
    together: int = 11
    carries: tuple[str, ...] = ("wheels",)


LOAN_S = 35
_FACTS = "on which card, driver, memory and versions does all else depend?"


def _module(name: str, words: str) -> tuple[str, ...]:
    return ("-m", f"tools.gpu_day.{name}", *words.split())


def _job(
    name: str,
    question: str,
    flags: str,
    *,
    fault: str = "",
    of: str = "",
    options: str = "",
    seconds: tuple[float, float] = (70, 170),
    turn: Turn = Turn.TOGETHER,
    after: str = "",
) -> Step:
    """Return a step that trains with job.py; `seconds` are the usual and the most."""
    fault = f"--fault {fault}" if fault else ""
    return Step(
        name=name,
        question=question,
        words=_module("job", f"{name} {options} {fault} -- {flags}"),
        usual_s=seconds[0],
        most_s=seconds[1],
        turn=turn,
        of=of,
        after=after,
    )


def _exact(name: str, question: str, flags: str, *, fault: str = "", of: str = "alone") -> Step:
    """Return a step of one deterministic rank."""
    return _job(name, question, f"{_EXACT} {flags}", fault=fault, of=of)


def _two(name: str, question: str, flags: str, *, fault: str = "", of: str = "") -> Step:
    """Return a step of two deterministic ranks over gloo, by way of the host."""
    flags = f"{_EXACT} {flags}"
    return _job(name, question, flags, fault=fault, of=of, options="--ranks 2", seconds=(90, 190))


def _nccl(name: str, question: str, flags: str, *, fault: str = "", of: str = "") -> Step:
    """Return a step of two ranks over NCCL: few iterations, as each collective takes milliseconds."""
    flags = f"{_EXACT} --train-iters 8 {flags}"
    options = "--ranks 2 --backend nccl"
    return _job(
        *(name, question, flags),
        fault=fault,
        of=of,
        options=options,
        seconds=(50, 120),
        after="nccl-probe",
    )


def _te(name: str, question: str, flags: str, *, fault: str = "", of: str = "") -> Step:
    """Return a step whose kernels need a GPU: a rehearsal reads its flags."""
    seconds = (70 if fault else 45, 170)
    step = _job(name, question, flags, fault=fault, of=of, seconds=seconds, after="te-import")
    return replace(step, rehearsed=_module("job", f"{name} --only-check -- {flags}"))


def _recipe(name: str, question: str, flags: str, *, fault: str = "") -> Step:
    """Return a step that trains with Megatron-Bridge: a rehearsal reads its flags."""
    step = _job(*(name, question, flags), fault=fault, options="--model recipe", seconds=(120, 300))
    check = _module("job", f"{name} --only-check -- {flags}")
    if fault:
        return replace(step, of="bridge", after="bridge", rehearsed=check)
    return replace(step, turn=Turn.FIRST, rehearsed=check)


def _big(name: str, question: str, flags: str, usual_s: float) -> Step:
    options, seconds = "--model big", (usual_s, 150)
    return _job(name, question, flags, options=options, seconds=seconds, turn=Turn.ALONE)


def _tests(name: str, question: str, usual_s: float, words: str, rehearsed: str = "") -> Step:
    base = ("-m", "pytest", "-q", "-rsfE", "-p", "no:cacheprovider", "-x")
    return Step(
        name=name,
        question=question,
        words=(*base, *words.split()),
        rehearsed=(*base, *rehearsed.split()) if rehearsed else (),
        usual_s=usual_s,
        most_s=170,
    )


def _alone(name: str, question: str, usual_s: float, module: str, words: str, **env: str) -> Step:
    return Step(
        name=name,
        question=question,
        words=_module(module, words),
        usual_s=usual_s,
        most_s=2 * usual_s + 20,
        turn=Turn.ALONE,
        env=env,
    )


def _stall(candidate: str, num_parameters: int, question: str, usual_s: float) -> Step:
    name = f"stall-{candidate}-{num_parameters}"
    words = f"{name} {candidate} --parameters {num_parameters}"
    return _alone(name, question, usual_s, "stall", words)


def _overlap(connections: str) -> Step:
    name, question = f"overlap-{connections}", f"do copies hide with {connections} queues?"
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    return _alone(name, question, 12, "rates", f"overlap {name}", **env)


def _first(name: str, question: str, module: str, usual_s: float, most_s: float) -> Step:
    words = _module(module, "")
    return Step(
        name=name,
        question=question,
        words=words,
        usual_s=usual_s,
        most_s=most_s,
        turn=Turn.FIRST,
    )


_EXACT = "--deterministic-mode --attention-backend unfused"
_DENSE = "--moe-ft-strategy dense"
_SPARSE = "--moe-ft-strategy sparse --moe-ft-window 3"
_SPARSE_2 = "--moe-ft-strategy sparse --moe-ft-window 2"
_PARTIAL = "--moe-ft-strategy partial --moe-ft-k-snapshot 8"  # all: no tokens are lost
_LOCAL = f"{_SPARSE_2} --moe-ft-upstream-log"
_BREAKPOINTS = f"{_DENSE} --moe-ft-breakpoints --moe-ft-interval"
_REPAIR = "--moe-ft-repair auto --moe-ft-allow-untested repair"
_EP, _PP = "--expert-model-parallel-size 2", "--pipeline-model-parallel-size 2"
_KILLED = "is a job that was killed and started again bitwise equal"
_REPAIRED = "is a job that was repaired in place bitwise equal"
_KERNELS = (
    "tests/unit/moe_ft/kernels tests/gpu/test_gpu_packing.py tests/gpu/test_gpu_boundary_log.py"
)
_RENEWALS = "are groups of NCCL aborted and renewed 20 times without growth?"

FACTS = _first("facts", _FACTS, "facts", 10, 60)

# A row for each step, which formatting would spread over ten lines.
# fmt: off
FIRST = Day(
    name="first",
    shows="a stock job trains, each strategy recovers bitwise, kernels are right, what checkpoints cost",
    budget_s=390,
    steps=(
        _job("defaults", "does a stock job train with all defaults, torch.compile too?", "",
             options="--with-compile", seconds=(60, 170)),
        _job("alone", "does a deterministic job train?", _EXACT, seconds=(35, 120)),
        _exact("dense", f"{_KILLED} (dense)?", _DENSE, fault="kill:0@6:backward"),
        _exact("sparse", f"{_KILLED} (sparse)?", _SPARSE, fault="kill:0@7:backward"),
        _exact("partial", f"{_KILLED} (partial)?", _PARTIAL, fault="kill:0@6:backward"),
        _exact("packed", f"{_KILLED} (kernels pack state)?",
               f"{_DENSE} --moe-ft-staging-bytes 1MiB", fault="kill:0@6:backward"),
        _exact("split", f"{_KILLED} (shifted masters, in a step)?",
               f"{_SPARSE} --moe-ft-state-dtype master=split", fault="kill:0@7:in-step"),
        _exact("breakpoint", "does SIGTERM leave a breakpoint, and is what follows bitwise equal?",
               f"{_BREAKPOINTS} 5", fault="terminate:0@6:backward"),
        _tests("kernel-bits", "do kernels give the bits of their reference?", 90, _KERNELS,
               rehearsed="tests/unit/moe_ft/kernels/test_rounding.py"),
        _tests("nccl-one-rank", _RENEWALS, 60, "tests/gpu/test_gpu_repair.py -k groups_of_nccl"),
        _two("ep2", "do two expert-parallel ranks on one GPU train?", _EP),
        _two("ep2-repair", f"{_REPAIRED}?", f"{_EP} {_DENSE} {_REPAIR}",
             fault="kill:1@6:backward", of="ep2"),
        _two("ep2-dense", f"{_KILLED} (two ranks)?", f"{_EP} {_DENSE}",
             fault="kill:1@6:backward", of="ep2"),
        _two("pp2", "do two pipeline stages on one GPU train?", _PP),
        _two("pp2-local", f"{_KILLED} (local, from logs of boundaries)?", f"{_PP} {_LOCAL}",
             fault="kill:1@6:backward", of="pp2"),
        _alone("hostmem", "how fast are touch, pin, copy and hash, and when is a death known?",
               20, "rates", "hostmem hostmem"),
        _stall("none", 40, "what does an iteration take without checkpoints?", 18),
        _stall("moe_ft", 40, "what does a checkpoint of 6 GiB in every iteration cost?", 30),
        _stall("raw", 40, "what does a bare copy cost, the least that anybody pays?", 20),
        _stall("dcp-process", 40, "what does torch DCP cost, with pinned memory?", 35),
        _overlap("1"),
        _overlap("8"),
    ),
)

NCCL = Day(
    name="nccl",
    shows="two ranks share the GPU over NCCL: they train, are repaired, stopped, leave breakpoints",
    budget_s=330,
    together=2,
    carries=("wheels", "nccl"),
    steps=(
        _first("nccl-probe", "may two ranks share this GPU, and does an abort free a survivor?",
               "nccl_probe", 30, 130),
        # Those without a fault first: the others are compared with them.
        _nccl("n-ep2", "do two expert-parallel ranks train?", _EP),
        _nccl("n-pp2", "do two pipeline stages train?", _PP),
        _nccl("n-ep2-repair", f"{_REPAIRED} (experts)?", f"{_EP} {_DENSE} {_REPAIR}",
              fault="kill:1@4:backward", of="n-ep2"),
        _nccl("n-pp2-repair", f"{_REPAIRED} (stages, in a step)?", f"{_PP} {_SPARSE_2} {_REPAIR}",
              fault="kill:1@4:in-step", of="n-pp2"),
        _nccl("n-ep2-dense", f"{_KILLED} (experts)?", f"{_EP} {_DENSE}",
              fault="kill:1@4:backward", of="n-ep2"),
        _nccl("n-pp2-local", f"{_KILLED} (local)?", f"{_PP} {_LOCAL}",
              fault="kill:1@4:backward", of="n-pp2"),
        _nccl("n-dp2", "do two data-parallel ranks train?", ""),
        _nccl("n-ep2-stop", "is a rank that stands still replaced, bitwise equal?",
              f"{_EP} {_DENSE} {_REPAIR} --moe-ft-repair-heartbeat-s 15",
              fault="stop:1@4:forward", of="n-ep2"),
        _nccl("n-dp2-breakpoint", "do ranks abort NCCL, leave breakpoints and go on bitwise equal?",
              f"{_BREAKPOINTS} 3", fault="terminate:1@4:backward", of="n-dp2"),
    ),
)

_GROUPED = f"{_EXACT} --moe-grouped-gemm"
_FP8 = f"{_GROUPED} --moe-router-padding-for-quantization"
_DELAYED = f"{_FP8} --fp8-format hybrid --fp8-recipe delayed"
_BLOCKWISE = f"{_FP8} --fp8-format e4m3 --fp8-recipe blockwise"
_WEIGHTS = (
    f"{_BLOCKWISE} --fp8-param-gather --use-precision-aware-optimizer --exp-avg-dtype bf16 "
    "--exp-avg-sq-dtype bf16"
)
_FUSED = f"{_GROUPED} --moe-permute-fusion"
_OFFLOADED = (
    f"{_EXACT} --use-precision-aware-optimizer --optimizer-cpu-offload "
    "--optimizer-offload-fraction 0.5 --overlap-cpu-optimizer-d2h-h2d"
)
_GRAPHS = f"{_EXACT} --te-rng-tracker --cuda-graph-modules attn --cuda-graph-impl"
_ROUTER_GRAPHS = f"{_SPARSE} --moe-ft-allow-untested cuda-graphs --cuda-graph-modules attn moe_router"
_GRAPHS_ALLOWED = f"{_DENSE} --moe-ft-allow-untested cuda-graphs"
# Flags of published launch scripts of Megatron that one GPU can have; nothing for determinism.
_RECIPE = (
    "--moe-grouped-gemm --moe-permute-fusion --moe-router-fusion --moe-router-dtype fp32 "
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te --overlap-grad-reduce "
    "--overlap-param-gather --manual-gc --manual-gc-interval 5 --recompute-granularity selective "
    "--recompute-modules moe_act layernorm --use-precision-aware-optimizer --main-grads-dtype fp32 "
    "--main-params-dtype fp32 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
)
TE = Day(
    name="te",
    shows="Transformer Engine: grouped GEMM, FP8, fused permutation, CUDA graphs, a real recipe",
    budget_s=330,
    carries=("wheels", "te"),
    steps=(
        _first("te-import", "does Transformer Engine load, and do its kernels run?",
               "te_check", 20, 60),
        _te("te-grouped", "does a job train with grouped GEMM?", _GROUPED),
        _te("te-grouped-sparse", f"{_KILLED} (grouped GEMM)?", f"{_GROUPED} {_SPARSE}",
            fault="kill:0@7:backward", of="te-grouped"),
        _te("te-recipe", "does a job train with a real recipe?", _RECIPE),
        _te("te-recipe-again", "does the recipe repeat its own bits?", _RECIPE, of="te-recipe"),
        _te("te-recipe-dense", f"{_KILLED} (recipe)?", f"{_RECIPE} {_DENSE}",
            fault="kill:0@6:backward", of="te-recipe"),
        _te("te-blockwise", "does a job train in FP8 by blocks?", _BLOCKWISE),
        _te("te-blockwise-dense", f"{_KILLED} (FP8 by blocks)?", f"{_BLOCKWISE} {_DENSE}",
            fault="kill:0@6:backward", of="te-blockwise"),
        _te("te-delayed", "does a job train in FP8 with delayed scales?", _DELAYED),
        _te("te-delayed-sparse", f"{_KILLED} (delayed scales)?", f"{_DELAYED} {_SPARSE_2}",
            fault="kill:0@7:backward", of="te-delayed"),
        _te("te-weights", "does a job train with FP8 parameters?", _WEIGHTS),
        _te("te-weights-sparse", f"{_KILLED} (FP8 parameters)?", f"{_WEIGHTS} {_SPARSE_2}",
            fault="kill:0@7:backward", of="te-weights"),
        _te("te-delayed-weights", "do FP8 parameters train with delayed scales?",
            f"{_DELAYED} --fp8-param-gather"),
        _te("te-delayed-weights-dense", f"{_KILLED} (FP8 parameters, delayed scales)?",
            f"{_DELAYED} --fp8-param-gather {_DENSE}",
            fault="kill:0@6:backward", of="te-delayed-weights"),
        _te("te-offload", "does a job train with half of its optimizer on the host?", _OFFLOADED),
        _te("te-offload-sparse", f"{_KILLED} (optimizer on the host)?", f"{_OFFLOADED} {_SPARSE_2}",
            fault="kill:0@7:backward", of="te-offload"),
        _te("te-permute", "does a job train with fused permutation?", _FUSED),
        _te("te-permute-dense", f"{_KILLED} (permutation)?", f"{_FUSED} {_DENSE}",
            fault="kill:0@6:backward", of="te-permute"),
        _te("te-graphs", "does a job train with graphs of Transformer Engine?",
            f"{_GRAPHS} transformer_engine"),
        _te("te-graphs-dense", f"{_KILLED} (its graphs)?",
            f"{_GRAPHS} transformer_engine {_GRAPHS_ALLOWED}",
            fault="kill:0@6:backward", of="te-graphs"),
        _te("te-graphs-sparse", f"{_KILLED} (window, router in graphs)?",
            f"{_GRAPHS} transformer_engine {_ROUTER_GRAPHS}",
            fault="kill:0@7:backward", of="te-graphs"),
        _te("te-local-graphs", "does a job train with graphs of Megatron?", f"{_GRAPHS} local"),
        _te("te-local-graphs-dense", f"{_KILLED} (those)?", f"{_GRAPHS} local {_GRAPHS_ALLOWED}",
            fault="kill:0@6:backward", of="te-local-graphs"),
    ),
)

LARGE = Day(
    name="large",
    shows="a job with 7 GB of masters and moments, with and without checkpoints; speed of kernels",
    budget_s=250,
    steps=(
        _big("big-none", "what does an iteration take without checkpoints?", "", 50),
        _big("big-dense", "what does it take with a dense snapshot in each?", _DENSE, 75),
        _big("big-sparse", "what does it take with a sparse snapshot in each?", _SPARSE, 75),
        _alone("kernel-speed", "how fast do kernels pack, next to a copy on the device?",
               60, "rates", "kernels kernel-speed"),
        _stall("moe_ft", 1000, "what do 1000 parameters cost instead of 40?", 30),
        _stall("moe_ft-storage", 40, "what does storage cost on top?", 40),
    ),
)
BRIDGE = Day(
    name="bridge",
    shows="a recipe of Megatron-Bridge, made small, trains and recovers bitwise: in its container",
    budget_s=330,
    together=2,
    steps=(
        _recipe("bridge", "does a recipe of Megatron-Bridge train, and Bridge import?", ""),
        _recipe("bridge-dense", f"{_KILLED} (Bridge)?", _DENSE, fault="kill:0@6:backward"),
        _recipe("bridge-sparse", f"{_KILLED} (Bridge, window)?", _SPARSE, fault="kill:0@7:backward"),
    ),
)
# fmt: on
DAYS = {day.name: day for day in (FIRST, NCCL, TE, LARGE, BRIDGE)}
