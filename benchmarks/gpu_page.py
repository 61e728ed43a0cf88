"""The page that `gpu.py` writes."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from typing import Any

from gpu_parts import Part

# From bad to good: of several outcomes of one test the worst counts.
_ORDER = ("failed", "passed", "skipped")


def page(facts: dict[str, Any], tests: list[Part], benchmarks: list[Part], seconds: float) -> str:
    """All of it: versions, devices, tests, tables."""
    lines = [f"lightning-commhooks on GPUs: {datetime.date.today()}, {seconds / 60:.1f} minutes", ""]
    names = [name for name in facts if name != "devices"]
    lines += [", ".join(f"{name} {facts[name] or 'unknown'}" for name in names)]
    lines += [f"{len(facts['devices'])} device{'s' * (len(facts['devices']) != 1)}:"]
    lines += [f"  {number}: {device}" for number, device in enumerate(facts["devices"])]
    if tests:
        lines += ["", *_of_tests(tests)]
    for part in benchmarks:
        lines += ["", *_of_benchmark(part)]
    return "\n".join(lines) + "\n"


def outcomes(tests: list[Part]) -> dict[str, tuple[str, str]]:
    """Outcome of each test and what it says, by its name."""
    found: dict[str, tuple[str, str]] = {}
    for part in tests:
        lines = part.outcomes.read_text().splitlines() if part.outcomes and part.outcomes.exists() else []
        for name, outcome, text in map(json.loads, lines):
            known = found.get(name)
            if known is None or _ORDER.index(outcome) < _ORDER.index(known[0]):
                found[name] = outcome, text
    return found


def _of_tests(tests: list[Part]) -> list[str]:
    found = outcomes(tests)
    counts = Counter(outcome for outcome, _ in found.values())
    took = max(part.seconds for part in tests)
    lines = [f"Tests: {', '.join(f'{counts[outcome]} {outcome}' for outcome in ('passed', 'failed', 'skipped'))}"]
    lines[0] += f", in {took:.0f} s"
    for part in tests:
        if part.code is None:
            lines.append(f"  took too long, some tests did not run: {part.command}")
        elif part.code not in (0, 1):
            lines.append(f"  exit code {part.code}: {part.command}")
    for name, (outcome, text) in found.items():
        if outcome == "failed":
            lines += [f"  failed: {name}", f"    {text}"]
    reasons = Counter(text for outcome, text in found.values() if outcome == "skipped")
    return [*lines, *(f"  skipped, {number}: {text}" for text, number in reasons.items())]


def _of_benchmark(part: Part) -> list[str]:
    lines = part.output.strip().splitlines()
    if not lines or not lines[0].startswith("$"):
        lines.insert(0, f"$ {part.command}")
    if part.code is None:
        lines.append(f"(took too long: ended after {part.seconds:.0f} s)")
    elif part.code:
        lines.append(f"(failed, exit code {part.code})")
    return lines
