"""An island as objects of Kubernetes: a Job on one node, a JobSet on several, which restarts all of
them together.
"""

import shlex
from typing import Any

from diloco.errors import FINAL_STATUS
from diloco.launch_files.islands import PORT, PlacedIsland

GRACE_SECONDS = 900
"""Time for the end of the round, when the island is asked to leave."""
MAX_RESTARTS = 100


def island_objects(
    island: PlacedIsland, config: str, image: str, settings: list[str]
) -> list[dict[str, Any]]:
    """Return a ConfigMap with the config, a NetworkPolicy against others, and the Job or JobSet."""
    objects = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": island.name},
            "data": {"run.yaml": config},
        },
        network_policy(island.name),
    ]
    job = job_spec(island, image, settings)
    if island.nodes == 1:
        return [
            *objects,
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": island.name},
                "spec": job,
            },
        ]
    return [*objects, job_set(island.name, job)]


def network_policy(name: str) -> dict[str, Any]:
    """Return the policy that only the island's own pods may reach its pods.

    Anyone who reaches torchrun's store could run code in the island.
    """
    chosen = {"matchLabels": {"app": name}}
    spec = {
        "podSelector": chosen,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": chosen}]}],
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": spec,
    }


def job_set(name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Return a JobSet of all nodes of an island.

    If one fails, all are restarted, unless the failure would repeat itself.
    """
    rules = [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": MAX_RESTARTS, "rules": rules},
        "replicatedJobs": [
            {"name": "nodes", "replicas": 1, "template": {"spec": job | {"backoffLimit": 0}}}
        ],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": spec,
    }


def job_spec(island: PlacedIsland, image: str, settings: list[str]) -> dict[str, Any]:
    """Return a job with one pod per node. Exit status FINAL_STATUS ends the job for good."""
    final = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [FINAL_STATUS]}}
    return {
        "completionMode": "Indexed",
        "completions": island.nodes,
        "parallelism": island.nodes,
        "backoffLimit": MAX_RESTARTS,
        "podFailurePolicy": {"rules": [final]},
        "template": {
            "metadata": {"labels": {"app": island.name}},
            "spec": pod_spec(island, image, settings),
        },
    }


def pod_spec(island: PlacedIsland, image: str, settings: list[str]) -> dict[str, Any]:
    """Return the pod of a node.

    It needs the volume claim diloco-runs, and with a run key the secret diloco-run-key.
    """
    key = ["island.run_key_file=/key/key"] if island.run_key_file else []
    values = ["island.run_dir=/runs", "island.cache_dir=/cache", *key, *settings]
    head = f"{island.name}-nodes-0-0.{island.name}"
    stop = (
        f"touch /runs/{shlex.quote(f'{island.run}/{island.label}')}/stop-after-round; sleep "
        f"{GRACE_SECONDS - 20}"
    )
    volumes = [
        {"name": "config", "configMap": {"name": island.name}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": "diloco-runs"}},
        {"name": "cache", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if island.run_key_file:
        volumes.append(
            {"name": "key", "secret": {"secretName": "diloco-run-key", "defaultMode": 0o400}}
        )
    paths = {
        "config": "/config",
        "runs": "/runs",
        "cache": "/cache",
        "shm": "/dev/shm",
        "key": "/key",
    }
    container = {
        "name": "island",
        "image": image,
        "command": island.command("/config/run.yaml", head, "$(POD_IP)", values),
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"containerPort": PORT}],
        # SIGTERM is sent only after this hook, because it makes the island leave at once.
        "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", stop]}}},
        "resources": {"limits": {"nvidia.com/gpu": island.gpus}},
        "volumeMounts": [
            {"name": each["name"], "mountPath": paths[each["name"]]} for each in volumes
        ],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [container],
        "volumes": volumes,
    }
