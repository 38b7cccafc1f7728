"""A training job of a day, undisturbed or with a fault. Its digests are left to be compared (day.py).

    python -m tools.gpu_day.job NAME [--ranks N] [--fault FAULT] [--backend gloo|nccl] [--model big|recipe]
        [--with-compile] [--only-check] -- FLAG...

One rank starts by itself, and again after a fault. Several share the first GPU (one_gpu.py) under torchrun,
which starts them again, or, with --moe-ft-repair, under `moe_ft keep`, which replaces the dead one.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from megatron.training.arguments import add_megatron_arguments

from megatron.fault_tolerance.program.arguments import add_flags
from megatron.fault_tolerance.seams.settings import checked_config
from moe_ft.cluster.target import BRIDGE, is_found
from moe_ft.errors import ConfigError
from moe_ft.events import event_path, read_events
from tools.gpu_day.day import memory_of
from tools.gpu_day.results import IS_REHEARSAL, ROOT, WORK, note, rate

MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --ffn-hidden-size 512 "
    "--moe-ffn-hidden-size 512 --num-experts 8 --moe-router-topk 2 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 0.01 --seq-length 256 --max-position-embeddings 256 "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --swiglu "
    "--untie-embeddings-and-output-weights --hidden-dropout 0.1 --attention-dropout 0.0 "
    "--micro-batch-size 4 --global-batch-size 16 --train-iters 12 --lr 1e-3 "
    "--lr-decay-style constant --clip-grad 1.0 --bf16 --use-distributed-optimizer --log-interval 1 "
    "--eval-interval 1000 --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 1024 "
    "--mock-data --split 100,0,0 --distributed-timeout-minutes 2 --seed 1234"
)
# Of two values of a flag the last one counts. 0.6 B parameters: 7.2 GB of masters and moments.
BIG = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --ffn-hidden-size 1536 "
    "--moe-ffn-hidden-size 1536 --num-experts 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--hidden-dropout 0.0 --lr 1e-4 --train-iters 25 --log-interval 5"
)
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 64 "
    "--moe-ffn-hidden-size 64 --seq-length 32 --max-position-embeddings 32 "
    "--vocab-size 256 --micro-batch-size 2 --global-batch-size 8"
)
# Of Megatron-Bridge, made small; its data are made up, and it asks for nothing from a network.
RECIPE = (
    "olmoe_7b_pretrain_8gpu_h100_bf16_config model.num_layers=4 model.hidden_size=256 "
    "model.num_attention_heads=8 model.num_query_groups=8 model.kv_channels=32 "
    "model.ffn_hidden_size=512 model.moe_ffn_hidden_size=512 model.num_moe_experts=8 "
    "model.moe_router_topk=2 model.expert_model_parallel_size=1 model.vocab_size=1024 "
    "model.seq_length=256 model.deterministic_mode=true model.cross_entropy_loss_fusion=false "
    "tokenizer.vocab_size=1024 dataset.seq_length=256 dataset.num_workers=0 "
    "dataset.persistent_workers=false train.train_iters=12 train.global_batch_size=16 "
    "train.micro_batch_size=4 validation.eval_iters=0 scheduler.lr_warmup_iters=2 "
    "scheduler.lr_decay_iters=12 optimizer.lr=1e-3 checkpoint.save=null checkpoint.load=null "
    "logger.log_interval=1 logger.tensorboard_dir=null"
)
_WARM = 6  # iterations that are not measured, if there are enough


class Job:
    """A job, its processes and its event logs."""

    def __init__(self, options: argparse.Namespace, flags: Sequence[str]) -> None:
        self.name: str = options.name
        self.num_ranks: int = options.ranks
        self.fault: str = options.fault
        self.backend = "gloo" if IS_REHEARSAL else options.backend
        self.is_compiled = options.with_compile and not IS_REHEARSAL
        self.folder: Path = WORK / "jobs" / self.name
        self.memory = memory_of(self.name)
        self.flags = [*flags, "--moe-ft-event-log", str(self.folder / "events")]
        self.flags += ["--moe-ft-state-digest"]
        if "--moe-ft-strategy" in flags:
            self.flags += ["--moe-ft-job-id", self.name, "--moe-ft-memory-dir", str(self.memory)]
        if self.fault:
            self.flags += ["--moe-ft-inject-fault", self.fault]
        self.program = self._program(options.model)

    def _program(self, model: str) -> list[str]:
        """Return what Python runs. Jobs share no cache: Megatron reads one while another job writes it."""
        cache = str(self.folder / "cache")
        if model == "recipe":
            recipe = ["examples/bridge_recipe.py", *RECIPE.split()]
            return [
                "-m",
                "moe_ft",
                "run",
                *self.flags,
                "--",
                *recipe,
                f"dataset.path_to_cache={cache}",
            ]
        found = ["pretrain_gpt_moe.py", *MODEL.split(), *(BIG.split() if model == "big" else ())]
        if IS_REHEARSAL:
            found += SMALL.split()
        found += [*self.flags, "--data-cache-path", cache]
        return [*found, "--distributed-backend", self.backend] if self.backend else found

    @property
    def is_repaired(self) -> bool:
        """True if `moe_ft keep` replaces ranks."""
        return "--moe-ft-repair" in self.flags

    def run(self) -> str:
        """Train; return why that is no result, if so."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            code = self._start(0)
            if self.fault and self.num_ranks == 1:
                if code == 0 or not self.events("fault_injected"):
                    return f"exit code {code} before the fault: {self._said(0)}"
                code = self._start(1)
        finally:
            shutil.rmtree(self.memory, ignore_errors=True)
        last = int(bool(self.fault) and self.num_ranks == 1)
        return f"exit code {code}: {self._said(last)}" if code else ""

    def _start(self, number: int) -> int:
        env = {
            **os.environ,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
            "NCCL_ALGO": "Ring",
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        }
        if not self.is_compiled:
            env["TORCHDYNAMO_DISABLE"] = "1"  # starts are faster, and it is another question
        words = self.program
        if self.num_ranks == 1:
            env["TORCHELASTIC_RESTART_COUNT"] = str(number)
        else:
            env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            words = [*self._launcher(), "-m", "tools.gpu_day.one_gpu", *words]
        words = [sys.executable, *words]
        with self._log(number).open("w") as log:
            print("$", *words, file=log, flush=True)
            return subprocess.run(words, cwd=ROOT, env=env, stdout=log, stderr=log).returncode

    def _launcher(self) -> list[str]:
        with socket.socket() as each:
            each.bind(("127.0.0.1", 0))
            port = each.getsockname()[1]
        num_processes = "1" if self.is_repaired else str(self.num_ranks)
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", num_processes]
        launcher += ["--max-restarts", "2", "--rdzv-backend", "c10d", "--rdzv-id", self.name]
        launcher += ["--rdzv-endpoint", f"localhost:{port}"]
        keep = ["-m", "moe_ft", "keep", "--ranks-per-node", str(self.num_ranks), "--"]
        return [*launcher, *(keep if self.is_repaired else [])]

    def _log(self, number: int) -> Path:
        return self.folder / f"start_{number}.log"

    def _said(self, number: int) -> str:
        """Return the line of a log that names the error best. The launcher's own is about all ranks alike."""
        text = self._log(number).read_text(errors="replace")
        lines = [each for each in text.splitlines() if each.strip() and "ChildFailed" not in each]
        for mark in (": error: ", "Error: ", "moe_ft: "):
            if marked := [each for each in lines if mark in each]:
                return marked[-1][:300]
        return lines[-1][:300]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events of these kinds, of all ranks one after the other."""
        paths = [event_path(self.folder / "events", rank) for rank in range(self.num_ranks)]
        return [
            each
            for path in paths
            if path.exists()
            for each in read_events(path)
            if each["event"] in kinds
        ]

    def digests(self) -> list[list[str]]:
        """Return the last digests of each rank: of weights and moments, and of all state."""
        found = {each["rank"]: each for each in self.events("state_digest")}
        return [[found[rank]["sha256"], found[rank]["sha256_all"]] for rank in sorted(found)]

    def problems(self) -> list[str]:
        """Return what the events lack of what the job was to show."""
        found = []
        if len(self.digests()) < self.num_ranks:
            found.append("ranks have left no digest")
        losses = [each["loss"] for each in self.events("iteration") if each["loss"] is not None]
        if not self.fault and not (losses and losses[-1] < losses[0]):
            found.append("the loss does not fall")
        if self.fault and not self.events("recovery"):
            found.append("nothing was recovered")
        if self.is_repaired and not self.events("repair"):
            found.append("nothing was repaired in place")
        if "--moe-ft-breakpoints" in self.flags:
            ends = self.events("breakpoint")
            if not ends or any(each["problem"] for each in ends):
                found.append(f"breakpoints: {[each['problem'] for each in ends]}")
        return found

    def _num_skipped(self) -> int:
        return sum(each.get("part") == "snapshot" for each in self.events("skipped"))

    def figures(self) -> str:
        """Return the figures of the events in words."""
        ends = self.events("iteration")
        ends = ends[_WARM:] if len(ends) > 2 * _WARM else ends
        losses = [each["loss"] for each in ends if each["loss"] is not None]
        parts = [
            f"{self.num_ranks} ranks",
            f"{1e3 * median(each['iteration_s'] for each in ends):.0f} ms an iteration, of it stalled "
            f"{1e3 * median(each['stall_s'] for each in ends):.1f} "
            f"(most {1e3 * max(each['stall_s'] for each in ends):.1f})",
        ]
        if losses:
            parts.append(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
        peak = max(
            (each["peak_device_memory_bytes"] or 0 for each in self.events("end")), default=0
        )
        if peak:
            parts.append(f"{peak / 2**30:.2f} GiB on the device")
        if snapshots := self.events("snapshot"):
            size, copy_s, whole_s = (
                median(each[key] for each in snapshots) for key in ("bytes", "copy_s", "seconds")
            )
            parts.append(
                f"{len(snapshots)} snapshots of {size / 2**20:.1f} MiB, copied in {1e3 * copy_s:.1f} ms "
                f"({rate(size, copy_s)} GB/s), complete after {whole_s:.2f} s, "
                f"{self._num_skipped()} skipped"
            )
        for each in self.events("degraded")[:1]:
            parts.append(f"degraded: {each['part']}: {each['reason'][:160]}")
        if recoveries := self.events("recovery"):
            parts.append(f"continued from iteration {recoveries[0]['iteration']}")
        if repairs := self.events("repair"):
            phases = {name: round(s, 2) for name, s in repairs[0]["phases_s"].items()}
            slowest_s = max(each["seconds"] for each in repairs)
            parts.append(
                f"repaired in place in {repairs[0]['seconds']:.2f} s (slowest {slowest_s:.2f}) {phases}"
            )
        return ", ".join(parts)


@cache
def _parser() -> argparse.ArgumentParser:
    return add_flags(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def check(name: str, num_ranks: int, flags: Sequence[str]) -> None:
    """Leave whether a start on a GPU accepts the flags of a job."""
    try:
        args = _parser().parse_args([*MODEL.split(), *flags, "--moe-ft-job-id", name])
        args.world_size = num_ranks
        checked_config(args)
    except ConfigError as error:
        note(name, str(error), is_good=False)
    else:
        note(name, "its flags are accepted")


def main(words: Sequence[str] | None = None) -> None:
    """Run a job and leave its result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--fault", default="")
    parser.add_argument("--backend", default="")
    parser.add_argument("--model", choices=("usual", "big", "recipe"), default="usual")
    parser.add_argument("--with-compile", action="store_true")
    parser.add_argument("--only-check", action="store_true", help="where kernels cannot run")
    given = list(sys.argv[1:] if words is None else words)
    place = given.index("--")
    options = parser.parse_args(given[:place])
    if options.ranks > 1 and not options.backend:
        options.backend = "gloo"
    if options.only_check:
        check(options.name, options.ranks, given[place + 1 :])
        return
    if options.model == "recipe" and not is_found(BRIDGE):
        note(options.name, f"left out: {sys.executable} finds no {BRIDGE}", is_good=False)
        return
    job = Job(options, given[place + 1 :])
    begin_s = time.monotonic()
    failure = job.run()
    seconds = time.monotonic() - begin_s
    if failure:
        note(job.name, f"{failure}, after {seconds:.0f} s", is_good=False)
        return
    problems = job.problems()
    line = "; ".join([*problems, f"{job.figures()}, start to end {seconds:.0f} s"])
    note(job.name, line, is_good=not problems, digest=job.digests())


if __name__ == "__main__":
    main()
