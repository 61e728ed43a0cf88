"""A short run of benchmarks/stress_launches.py."""

from forks import FORKS, ROOT, alone, run_alone

SCRIPT = ROOT / "benchmarks" / "stress_launches.py"


def test_one_launch_is_clean():
    options = ["--launches", "1", "--steps", "10", "--worlds", "2", "--timeout", "300"]
    stdout, _ = run_alone(SCRIPT, *options, environment=alone(**FORKS.launching()))
    assert stdout.splitlines()[-1].split()[:3] == ["2", "1", "1"]
