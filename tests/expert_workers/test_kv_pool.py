import torch

from expert_workers.kv_pool import KVPool


def make_pool() -> KVPool:
    return KVPool(
        num_layers=2,
        num_blocks=3,
        block_size=4,
        width=5,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_rows_come_back_from_the_slots_they_went_to() -> None:
    pool = make_pool()
    rows = torch.arange(15, dtype=torch.float32).view(3, 5)
    pool.write(1, torch.tensor([11, 0, 6]), rows)
    assert torch.equal(
        pool.gather(1, torch.tensor([[0, 6], [11, 11]])), rows[torch.tensor([[1, 2], [0, 0]])]
    )


def test_layers_are_apart() -> None:
    pool = make_pool()
    pool.write(1, torch.tensor([3]), torch.ones(1, 5))
    assert pool.gather(0, torch.arange(12)).eq(0).all()


def test_gathered_rows_are_a_copy() -> None:
    pool = make_pool()
    pool.gather(0, torch.tensor([2])).fill_(7.0)
    assert pool.rows.eq(0).all()


def test_size_is_counted_in_bytes() -> None:
    assert make_pool().num_bytes == 2 * 3 * 4 * 5 * 4
