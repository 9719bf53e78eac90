"""The closed inventory: whatever lies under experts moves with them, or is refused by name."""

from __future__ import annotations

import pytest
from train_hooks_ranks import inventory_items

from app.commands.verify_matrix import ranks
from app.local.ranks import run_ranks

pytestmark = pytest.mark.ranks


def test_any_item_under_experts_is_moved_or_refused_and_never_ignored():
    ends = run_ranks(inventory_items.items_are_moved_or_refused, ranks(1))
    assert ends["moved"] >= 5 and ends["refused"] >= 5 and ends["refused late"] >= 5, ends


def test_any_entry_of_the_optimizer_is_moved_or_refused_and_never_ignored():
    ends = run_ranks(inventory_items.entries_are_moved_or_refused, ranks(2))
    assert ends["moved"] >= 2 and ends["refused"] >= 5, ends
