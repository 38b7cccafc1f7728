"""The JobSet fits the schemas of JobSet and Kubernetes and the plan; pods of torchrun save before they end.

Pods with keep run real jobs in tests/distributed/test_pods.py.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from tests.shares import share_of
from tests.unit.examples.model_files import FOLDER, ROOT, plan_of, read_model

KUBERNETES = ROOT / "examples" / "kubernetes"
GIB = 2**30


def documents(*, with_repairs: bool = False, added: str = "") -> list[dict[str, Any]]:
    """Return the manifest as it is, or as the command in it changes it, and what it says to add to that."""
    path = KUBERNETES / "jobset.yaml"
    (script,) = re.findall(r"sed '(.*?)'", path.read_text())
    assert added in path.read_text()
    command = ["sed", f"{script if with_repairs else ''};{added}", str(path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return list(yaml.safe_load_all(shown))


def manifest(*, with_repairs: bool = False) -> dict[str, Any]:
    return documents(with_repairs=with_repairs)[0]


def check(document: Mapping[str, Any]) -> None:
    """Raise ValueError unless a document is a JobSet, fields of pods included.

    The models are generated from the schemas of the API servers. They drop fields that they do not know, and
    fail in several ways at a number where they expect an object.
    """
    try:
        known = JobsetV1alpha2JobSet.from_dict(dict(document))
    except (AttributeError, TypeError) as error:
        raise ValueError("a field has another type") from error
    if (
        known is None or known.to_dict() != document
    ):  # pydantic's ValidationError is a ValueError too
        raise ValueError("fields are unknown or missing")


@pytest.mark.parametrize("with_repairs", [False, True])
@pytest.mark.parametrize("added", ["", "s/# kueue: //", "s/# metrics: //"])
def test_manifest_is_a_jobset(with_repairs: bool, added: str) -> None:
    check(documents(with_repairs=with_repairs, added=added)[0])


def test_jobset_of_a_queue_waits_until_it_is_admitted() -> None:
    queued = documents(added="s/# kueue: //")[0]
    assert queued["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "training"}
    assert queued["spec"]["suspend"]


def test_prometheus_finds_and_reaches_the_port_that_pods_open_for_it_alone() -> None:
    jobset, policy, _ = documents(added="s/# metrics: //")
    (node,) = jobset["spec"]["replicatedJobs"]
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    monitor = yaml.safe_load((KUBERNETES / "podmonitor.yaml").read_text())
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    assert monitor["spec"]["selector"]["matchLabels"] == {
        "jobset.sigs.k8s.io/jobset-name": jobset["metadata"]["name"],
        "jobset.sigs.k8s.io/replicatedjob-name": node["name"],
    }
    (port,), (endpoint,) = container["ports"], monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == port["name"]
    given = {each["name"]: each.get("value") for each in container["env"]}
    assert given["METRICS_PORT"] == str(port["containerPort"])
    _, opened = policy["spec"]["ingress"]
    assert opened["ports"] == [{"port": port["name"]}]


@pytest.mark.parametrize("change", [{"resource": {}}, {"env": 7}], ids=str)
def test_misspelled_or_mistyped_field_is_found(change: dict[str, Any]) -> None:
    document = manifest()
    jobs = document["spec"]["replicatedJobs"]
    jobs[0]["template"]["spec"]["template"]["spec"]["containers"][0].update(change)
    with pytest.raises(ValueError, match=r"field|validation error"):
        check(document)


def pod(*, with_repairs: bool = False) -> dict[str, Any]:
    job = manifest(with_repairs=with_repairs)["spec"]["replicatedJobs"][0]["template"]["spec"]
    return dict(job["template"]["spec"])


def variables(*, with_repairs: bool = False) -> dict[str, str]:
    listed = pod(with_repairs=with_repairs)["containers"][0]["env"]
    found = {each["name"]: each.get("value", "") for each in listed}
    assert len(found) == len(listed)
    return found


def test_manifest_uses_what_has_no_refusal_on_gpus_unless_repairs_are_asked_for() -> None:
    assert not {"REPAIR", "EXTRA_FLAGS", "STORE", "MOE_FT_KEEP_TOKEN"} & variables().keys()
    given = variables(with_repairs=True)
    assert (given["REPAIR"], given["EXTRA_FLAGS"]) == ("auto", "--moe-ft-allow-untested repair")


def test_sizes_are_those_of_the_plan() -> None:
    name = Path(variables()["MODEL"]).stem
    plan = plan_of(name, variables()["STRATEGY"], "--moe-ft-breakpoints")
    container, memory = pod()["containers"][0], pod()["volumes"][0]["emptyDir"]
    size = int(memory["sizeLimit"].removesuffix("Gi")) * GIB
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) * GIB
    assert plan.node_bytes < size < 1.1 * plan.node_bytes
    assert f"{plan.node_bytes / 1e6:,.0f} MB" in (ROOT / "docs" / "kubernetes.md").read_text()
    assert limit - size >= 200 * GIB
    assert (
        container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
    )
    assert container["volumeMounts"][0] == {"name": "memory", "mountPath": "/dev/shm"}


@pytest.mark.parametrize("with_repairs", [False, True])
def test_numbers_that_say_the_same_are_equal(with_repairs: bool) -> None:
    document, given = manifest(with_repairs=with_repairs), variables(with_repairs=with_repairs)
    job, *stores = document["spec"]["replicatedJobs"]
    assert len(stores) == with_repairs
    name, own = document["metadata"]["name"], job["template"]["spec"]
    spares = own["parallelism"] - int(given["NODES"])
    assert own["completions"] == own["parallelism"] and spares == 1
    assert int(given["NODES"]) == read_model(Path(given["MODEL"]).stem).num_nodes
    assert own["successPolicy"] == {"rules": [{"succeededCount": int(given["NODES"])}]}
    meeting = (stores or [job])[0]["name"]
    assert given["RENDEZVOUS"].partition(":")[0] == f"{name}-{meeting}-0-0.{name}"
    keepers = [store["template"]["spec"]["template"]["spec"] for store in stores]
    for keeper in keepers:
        assert keeper["containers"][0]["command"][1] == f"NUMBER={given['STORE']}"
        assert int(given["STORE"]) >= own["parallelism"], "it has no ranks"
    for each in (pod(), *keepers):
        assert int(given["SAVE_SECONDS"]) + 60 <= each["terminationGracePeriodSeconds"]
    budget = documents()[2]["spec"]
    assert budget["minAvailable"] == int(given["NODES"])
    labels = {"jobset-name": name, "replicatedjob-name": job["name"]}
    assert budget["selector"]["matchLabels"] == {
        f"jobset.sigs.k8s.io/{label}": value for label, value in labels.items()
    }


@pytest.mark.parametrize("with_repairs", [False, True])
def test_pods_are_reached_by_each_other_alone_and_are_not_root(with_repairs: bool) -> None:
    job, policy, _ = documents(with_repairs=with_repairs)
    own = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": job["metadata"]["name"]}}
    assert policy["spec"] == {
        "podSelector": own,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": own}]}],
    }
    for each in job["spec"]["replicatedJobs"]:
        pod = each["template"]["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        user = str(pod["securityContext"]["runAsUser"])
        assert f"--uid {user} " in (ROOT / "Dockerfile").read_text()
        assert pod["automountServiceAccountToken"] is False
        container = pod["containers"][0]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not container["image"].endswith(":latest")


RANK = """
#!{python}
import json, os, pathlib, signal, sys, time
if "rescue" in sys.argv:
    sys.exit(print("rescued"))
flags = dict(zip(sys.argv, sys.argv[1:]))
events = pathlib.Path(flags["--moe-ft-event-log"])
events.mkdir(exist_ok=True)
def end(reason):
    line = json.dumps({"event": "end", "reason": reason})
    (events / "rank_00000.jsonl").open("a").write(line + "\\n")
    sys.exit(0)
assert flags["--exit-signal"] == "SIGUSR1"
signal.signal(signal.SIGUSR1, lambda *_: end("exit flag"))
print("ready", flush=True)
if os.environ["ENDS"] == "never":
    time.sleep(600)
if os.environ["ENDS"].isdigit():
    other = events / "rank_1_is_there"
    if os.environ["LOCAL_RANK"] != "0":
        other.touch()
        time.sleep(600)
    while not other.exists():
        time.sleep(0.01)
    sys.exit(int(os.environ["ENDS"]))
end(os.environ["ENDS"])
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the variables of a pod with one rank, which stands for Python and only notes its signals."""
    python = tmp_path / "python"
    python.write_text(RANK.replace("{python}", sys.executable).lstrip())
    python.chmod(0o700)
    return {
        **os.environ,
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MODEL": f"{FOLDER}/mixtral_8x7b.sh",
        "NODES": "1",
        "RANKS_PER_NODE": "1",
        "RUN_DIR": str(tmp_path),
        "RUN_NAME": "test",
        "MEMORY_DIR": str(tmp_path / "memory"),
        "DATA_PREFIX": "none",
        "RENDEZVOUS": "localhost:0",
        "MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.parametrize(("ends", "code"), [("finished", 0), ("exit flag", 75)])
def test_pod_succeeds_only_if_training_has_finished(
    ends: str, code: int, environment: dict[str, str]
) -> None:
    done = subprocess.run([KUBERNETES / "pod.sh"], env={**environment, "ENDS": ends}, timeout=240)
    assert done.returncode == code


@pytest.mark.parametrize("code", share_of([2, 3, 4], 2))
def test_pod_ends_with_the_code_of_a_rank_that_a_restart_at_once_would_not_help(
    code: int, environment: dict[str, str]
) -> None:
    given = {"ENDS": str(code), "RANKS_PER_NODE": "2", "MAX_RESTARTS": "5"}
    Path(environment["MEMORY_DIR"], "test").mkdir(parents=True)
    done = subprocess.run(
        [KUBERNETES / "pod.sh"],
        env={**environment, **given},
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
    )
    assert done.returncode == code
    assert done.stdout.count("ready") <= 2  # ranks of one start
    assert f"pod: exit code {code}: " in done.stdout
    assert ("rescued" in done.stdout) == (code == 2), "else storage cannot be written"


def test_sigterm_between_two_attempts_reaches_the_second(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "python").write_text(
        '#!/bin/sh\n[ -e "$0.1" ] && exec sleep 60\n: >"$0.1"\nexit 1\n'
    )
    functions = tmp_path / "functions"
    functions.write_text('echo() { case "$*" in *"start again"*) kill -TERM $$ ;; esac; }\n')
    given = {"REPAIR": "auto", "MAX_RESTARTS": "5", "BASH_ENV": str(functions), "ENDS": "never"}
    done = subprocess.run([KUBERNETES / "pod.sh"], env={**environment, **given}, timeout=240)
    assert done.returncode == 128 + signal.SIGTERM


def test_pod_that_is_removed_lets_its_ranks_save(
    environment: dict[str, str], tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [KUBERNETES / "pod.sh"],
        env={**environment, "ENDS": "never"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert any("ready" in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) != 0
    finally:
        process.kill()
    (line,) = (tmp_path / "events" / "rank_00000.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "exit flag"
