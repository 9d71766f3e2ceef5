"""Starting islands on clusters: the scripts in scripts/launch."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from diloco.config.schema import dump_config, load_config
from tests.swarm import swarm

LAUNCH = Path(__file__).parents[3] / "scripts" / "launch"
SLURM = str(LAUNCH / "slurm.sh")
ADDRESS = "/ip4/203.0.113.5/tcp/31337/p2p/QmPeer"


def needed(config="configs/two-clusters.yaml"):
    ours = {"DILOCO_CONFIG": str(config), "DILOCO_INDEX": "1", "DILOCO_BOOTSTRAP": ADDRESS}
    return {
        **os.environ,
        **ours,
        "DILOCO_PYTHON": sys.executable,
        "PYTHONPATH": str(LAUNCH.parents[1]),
    }


def slurm(*arguments, **env):
    command = ["bash", SLURM, *arguments]
    return subprocess.run(
        command,
        env=needed() | env,
        cwd=LAUNCH.parents[1],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_dry_run_prints_the_command_of_every_node_and_starts_nothing():
    done = slurm(
        "--dry-run",
        "outer.transport=gloo",
        "name=far",
        SLURM_NNODES="2",
        DILOCO_RANKS="4",
        SLURM_JOB_ID="7",
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    command = shlex.split(first)
    assert command[:5] == ["srun", "--nodes", "2", "--ntasks", "2"]
    assert command[command.index("--nproc-per-node") + 1] == "4"
    assert command[command.index("--rdzv-endpoint") + 1].endswith(":20007")
    assert {"island.ranks=8", "island.index=1", f"island.bootstrap=[{ADDRESS}]", "name=far"} <= set(
        command
    )
    assert "runs/far/island-1/stop-after-round" in second


def test_an_island_of_one_node_needs_no_rendezvous():
    done = slurm("--dry-run", DILOCO_RANKS="4", DILOCO_RESTARTS="5")
    command = shlex.split(done.stdout.splitlines()[0])
    launch = command[command.index("launch") :]
    assert (
        launch[:4] == ["launch", "--max-restarts", "5", "configs/two-clusters.yaml"]
        and "island.ranks=4" in launch
    )
    assert "torch.distributed.run" not in command


@pytest.mark.parametrize(
    ("arguments", "env", "problem"),
    [
        ([], {}, "this is not a SLURM job"),
        (["--dry-run"], {"DILOCO_BOOTSTRAP": ""}, "DILOCO_BOOTSTRAP is not set"),
        (["--dry-run"], {"DILOCO_RANKS": "many"}, "DILOCO_RANKS: got 'many'"),
        (["--dry-run"], {"DILOCO_PYTHON": "no/python"}, "there is no 'no/python'"),
    ],
)
def test_what_is_missing_or_wrong_is_named(arguments, env, problem):
    env = {"SLURM_JOB_ID": ""} | env
    done = slurm(*arguments, **env)
    assert done.returncode == 2 and problem in done.stderr


SRUN = """#!/usr/bin/env bash
while [[ $1 != bash ]]; do shift; done
exec "$@"
"""
SCONTROL = '#!/usr/bin/env bash\n[[ $1 == show ]] && echo localhost || echo "$@" >>"$REQUEUED"\n'


@pytest.mark.slow
@pytest.mark.parametrize(("is_asked", "rounds"), [(True, 100000), (False, 2)])
def test_a_job_whose_time_runs_out_leaves_after_its_round_and_is_queued_again(
    tmp_path, is_asked, rounds
):
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    settings = ["outer.transport=loopback", "island.device=cpu", f"outer.rounds={rounds}"]
    with swarm(tmp_path, *settings, islands=[{}]) as made:
        (tmp_path / "run.yaml").write_text(dump_config(made.config))
    requeued = tmp_path / "requeued.txt"
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "localhost",
        "REQUEUED": str(requeued),
        "DILOCO_INDEX": "0",
    }
    env = needed(tmp_path / "run.yaml") | job | {"DILOCO_RUN_DIR": str(tmp_path)}
    env["PATH"] = f"{tmp_path / 'bin'}:{env['PATH']}"
    with subprocess.Popen(["bash", SLURM], env=env, start_new_session=True) as child:
        try:
            if is_asked:
                wait_for(
                    tmp_path / "test" / "island-0" / "metrics.jsonl", '"committed": true', child
                )
                child.send_signal(signal.SIGUSR2)
            assert child.wait(90) == 0
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    assert ("asked to stop" in (tmp_path / "test" / "LOGBOOK.md").read_text()) == is_asked
    assert requeued.exists() == is_asked


def wait_for(path, text, child):
    deadline = time.monotonic() + 90
    while not (path.exists() and text in path.read_text()):
        assert child.poll() is None and time.monotonic() < deadline, (
            f"{text} did not come into {path}"
        )
        time.sleep(0.05)


@pytest.fixture(scope="module")
def objects():
    text = (LAUNCH / "kubernetes.yaml").read_text()
    for placeholder, value in (
        ("BOOTSTRAP_ADDRESS", ADDRESS),
        ("PUBLIC_ADDRESS", "198.51.100.7"),
        ("IMAGE", "x/y:1"),
    ):
        assert placeholder in text
        text = text.replace(placeholder, value)
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text)}


def test_the_kubernetes_objects_name_one_another(objects):
    job = objects["Job", "diloco-island-0"]["spec"]
    pod, labels = job["template"]["spec"], job["template"]["metadata"]["labels"]
    headless, public = (
        objects["Service", "diloco-island-0"],
        objects["Service", "diloco-island-0-public"],
    )
    assert (
        pod["subdomain"] == headless["metadata"]["name"] and headless["spec"]["clusterIP"] == "None"
    )
    assert headless["spec"]["selector"].items() <= labels.items()
    index = {"batch.kubernetes.io/job-completion-index": "0"}
    assert public["spec"]["selector"] == labels | index
    container = pod["containers"][0]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    assert ("ConfigMap", pod["volumes"][0]["configMap"]["name"]) in objects
    (port,) = {port["containerPort"] for port in container["ports"]}
    assert port == public["spec"]["ports"][0]["port"]
    policy = objects["NetworkPolicy", "diloco-island-0"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels and policy["policyTypes"] == ["Ingress"]
    siblings, others = policy["ingress"]
    assert siblings == {"from": [{"podSelector": {"matchLabels": labels}}]} and others == {
        "ports": [{"port": port}]
    }


def test_the_kubernetes_job_is_one_island_that_the_config_allows(objects, tmp_path):
    job = objects["Job", "diloco-island-0"]["spec"]
    container = job["template"]["spec"]["containers"][0]
    assert job["completions"] == job["parallelism"] == 1 and job["completionMode"] == "Indexed"
    assert container["command"][-2:] == ["diloco", "launch"]
    (tmp_path / "run.yaml").write_text(objects["ConfigMap", "diloco-run"]["data"]["run.yaml"])
    overrides = container["args"][container["args"].index("/config/run.yaml") + 1 :]
    config = load_config(tmp_path / "run.yaml", overrides)
    island = config.for_island(0)
    assert island.ranks == container["resources"]["limits"]["nvidia.com/gpu"]
    assert island.bootstrap == (ADDRESS,) and island.announce_host == "198.51.100.7"
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert {island.run_dir, island.cache_dir, str(Path(island.run_key_file).parent)} <= set(mounts)
    stop = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert f"{island.run_dir}/{config.name}/{island.label}/stop-after-round;" in stop
    port = next(port for port in container["ports"] if port["name"] == "island")
    assert island.listen_port == port["containerPort"]
