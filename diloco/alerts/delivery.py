"""Send an alert to a command or to a webhook, as island.alerts says."""

import json
import logging
import subprocess
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict

from diloco.alerts.rules import Alert
from diloco.config.island import AlertsConfig

log = logging.getLogger(__name__)

SECONDS = 15.0
"""Longest time of one attempt."""
PAUSES = (2.0, 10.0)
"""Seconds before the second and the third attempt."""


def deliver(
    alert: Alert, config: AlertsConfig, sleep: Callable[[float], None] = time.sleep
) -> bool:
    """Send the alert by each way that the config names. Return whether all succeeded, after at most
    three attempts.

    A failure is logged: it must not disturb the training.
    """
    body = json.dumps(asdict(alert) | {"text": f"{alert.run}: {alert.text}"})
    ways: list[Callable[[], None]] = []
    if config.command:
        ways.append(lambda: run_command(config.command, body))
    if config.webhook is not None:
        url = config.webhook
        ways.append(lambda: post(url, body))
    sent = [attempt(way, alert, sleep) for way in ways]
    return all(sent)


def attempt(send: Callable[[], None], alert: Alert, sleep: Callable[[float], None]) -> bool:
    """Try to send an alert up to three times. Return whether it was sent."""
    problem = ""
    for pause in (0.0, *PAUSES):
        sleep(pause)
        try:
            send()
        except (
            OSError,
            ValueError,
            subprocess.SubprocessError,
        ) as error:  # urllib's errors are OSErrors
            problem = f"{type(error).__name__}: {error}"
        else:
            return True
    log.error("an alert (%s) could not be sent: %s", alert.text, problem)
    return False


def run_command(command: tuple[str, ...], body: str) -> None:
    """Run the command with the alert as JSON on its standard input. Raises OSError or
    SubprocessError.
    """
    subprocess.run(command, input=body.encode(), timeout=SECONDS, check=True, capture_output=True)


def post(url: str, body: str) -> None:
    """Post the alert as JSON. Raises OSError or ValueError."""
    request = urllib.request.Request(
        url, body.encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=SECONDS):
        pass
