"""Top-k does what every hook has to do."""

from topk_plugin import TopK

from lightning_commhooks.testing import check_hook


def test_topk():
    """On two processes, which the check starts."""
    check_hook(TopK(ratio=0.1), num_ranks=(2,))
