"""Files for clusters: whole, of the forms that the clusters' programs know, and with commands that
load.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco.config.schema import load_config
from diloco.errors import ConfigError
from diloco.launch_files.write import ClusterOptions, Target, write_launch_files

ADDRESS = "203.0.113.7:31337"
OPTIONS = ClusterOptions(ADDRESS, image="example.org/diloco:1")
CONFIG = """
# A comment that stays.
name: Two_clusters
model: {preset: 1m}
data: {source: files, paths: [text], seq_len: 256}
optimizer: {tokens_per_step: 65536}
outer: {transport: tls, start_islands: 2}
island: {micro_batch: 4, relays: ["203.0.113.7:31400"], run_key_file: run.key}
islands: [{ranks: 8}, {ranks: 16}]
"""
JOB_SET_KEYS = {
    "network": {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"},
    "failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "replicatedJobs": {"name", "groupName", "template", "replicas", "dependsOn"},
}
"""Keys of a JobSet (jobset.x-k8s.io/v1alpha2) that we use, with the keys that each may have."""
RULE_KEYS = {
    "name",
    "action",
    "onJobFailureReasons",
    "onJobFailureMessagePatterns",
    "targetReplicatedJobs",
}
NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "given.yaml").write_text(CONFIG)
    return tmp_path / "given.yaml"


def write(
    target: Target, config: Path, *overrides: str, options: ClusterOptions = OPTIONS
) -> list[Path]:
    return write_launch_files(target, config, overrides, config.parent / "out", options)


def objects(path: Path) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(path.read_text())}


def pod_of(path: Path) -> dict[str, Any]:
    found = objects(path)
    spec = (
        found["Job"]["spec"]
        if "Job" in found
        else found["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    )
    return spec["template"]["spec"]


@pytest.mark.parametrize("target", ["slurm", "kubernetes", "skypilot"])
def test_every_target_gets_the_config_of_the_run_and_a_file_for_each_island(
    target: Target, config: Path
) -> None:
    written = write(target, config, "outer.codec=int4")
    assert [path.stem for path in written] == ["island-0", "island-1"] and all(
        path.is_file() for path in written
    )
    assert (config.parent / "out/run.yaml").read_text().endswith(CONFIG)
    assert all("outer.codec=int4" in path.read_text() for path in written)


def test_an_island_of_one_node_is_a_job_and_one_of_two_a_job_set(config: Path) -> None:
    first, second = write("kubernetes", config)
    assert set(objects(first)) == {"ConfigMap", "NetworkPolicy", "Job"}
    assert set(objects(second)) == {"ConfigMap", "NetworkPolicy", "JobSet"}
    job = objects(second)["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (2, 2, 0)


def test_a_job_set_has_keys_that_its_controller_knows(config: Path) -> None:
    spec = objects(write("kubernetes", config)[1])["JobSet"]["spec"]
    assert set(spec) == set(JOB_SET_KEYS)
    parts = [("network", spec["network"]), ("failurePolicy", spec["failurePolicy"])]
    for key, part in [*parts, ("replicatedJobs", spec["replicatedJobs"][0])]:
        assert set(part) <= JOB_SET_KEYS[key]
    assert all(set(rule) <= RULE_KEYS for rule in spec["failurePolicy"]["rules"])


def test_names_on_kubernetes_are_those_of_hosts(config: Path) -> None:
    for path in write("kubernetes", config):
        assert all(NAME.fullmatch(each["metadata"]["name"]) for each in objects(path).values())


def test_nobody_but_the_island_reaches_its_pods(config: Path) -> None:
    policy = objects(write("kubernetes", config)[1])["NetworkPolicy"]["spec"]
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
    assert "app" in policy["podSelector"]["matchLabels"]


def test_what_a_pod_mounts_is_a_volume_of_its_own(config: Path) -> None:
    pod = pod_of(write("kubernetes", config)[0])
    mounted = {each["name"] for each in pod["containers"][0]["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]} and "key" in mounted


@pytest.mark.parametrize("index", [0, 1])
def test_the_settings_of_a_pods_command_load(config: Path, index: int) -> None:
    pod = pod_of(write("kubernetes", config, "outer.codec=int4")[index])
    command = pod["containers"][0]["command"]
    settings = command[command.index("/config/run.yaml") + 1 :]
    loaded = load_config(config.parent / "out/run.yaml", settings)
    assert loaded.run.hash == load_config(config, ["outer.codec=int4"]).run.hash
    island = loaded.for_island(index)
    assert (
        island.bootstrap == (ADDRESS,)
        and island.run_key_file == "/key/key"
        and island.ranks == (8, 16)[index]
    )


def test_a_node_of_skypilot_fills_in_the_addresses(config: Path) -> None:
    task = yaml.safe_load(write("skypilot", config)[1].read_text())
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:8")
    node = {
        "PATH": "/usr/bin:/bin",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NODE_RANK": "1",
    }
    script = task["run"].replace("exec python", "printf '%s\\n' python")
    done = subprocess.run(
        ["bash", "-c", script], env=node, capture_output=True, text=True, timeout=60, check=True
    )
    assert {"--rdzv-endpoint=10.0.0.1:29500", "island.listen_host=10.0.0.2"} <= set(
        done.stdout.splitlines()
    )


def test_a_slurm_file_submits_the_islands_job(config: Path, tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text(
        '#!/bin/sh\necho "$DILOCO_INDEX $DILOCO_BOOTSTRAP $DILOCO_PYTHON $@"\n'
    )
    (tmp_path / "sbatch").chmod(0o755)
    path = write("slurm", config, "outer.codec=int4")[1]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", path, "--time", "1"], env=environment, capture_output=True, text=True, timeout=60
    )
    script = config.parent / "out/slurm.sh"
    expected = (
        f"1 {ADDRESS} {sys.executable} --nodes 2 --gpus-per-node 8 --time 1 {script} "
        "outer.codec=int4"
    )
    assert shlex.split(done.stdout) == shlex.split(expected)
    assert script.is_file()


@pytest.mark.parametrize(
    ("overrides", "options", "problem"),
    [
        (["islands=[{ranks: 12}]"], OPTIONS, "islands[0].ranks is 12"),
        (["islands=[]"], OPTIONS, "the config lists none"),
        (["island.relays=[]"], OPTIONS, "start `diloco relay`"),
        (["islands=[{ranks: 8, mesh: {tp: 3}}]"], OPTIONS, "island-0: "),
        ([], ClusterOptions(ADDRESS), "--image: kubernetes needs an image"),
    ],
)
def test_what_cannot_be_started_is_refused(
    config: Path, overrides: list[str], options: ClusterOptions, problem: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        write("kubernetes", config, *overrides, options=options)
    assert not (config.parent / "out").exists()
