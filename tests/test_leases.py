"""Batches without copies: nothing writes to a batch that somebody still looks at."""

import gc

import numpy as np
import pytest
from envs import CountEnv, Story, stories
from tables import deep

from shmvec import ShmVectorEnv
from shmvec._core import Lease

DEADLINE = 100.0


def counting(num_envs=4, **options):
    """Envs that observe how often they were stepped; a batch is those of one worker."""
    options = {"num_workers": 2, "copy": False} | options
    options.setdefault("batch_size", num_envs // max(1, options["num_workers"]))
    envs = ShmVectorEnv([CountEnv] * num_envs, **options)
    envs.async_reset()
    return envs


def is_view(array):
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, Lease)


@pytest.mark.parametrize("workers", [2, *deep(0, 1)])
def test_whole_workers_are_views_that_stay_as_they_are(workers):
    envs = counting(num_workers=workers, batch_size=4 // max(1, workers), num_buffers=40)
    try:
        kept = []
        for _ in range(30):
            *results, infos = envs.recv(timeout=DEADLINE)
            assert all(is_view(array) for array in results)
            kept.append((infos["env_id"], results, [array.copy() for array in results]))
            envs.send(infos["env_id"], infos["env_id"])
        for _, views, copies in kept:
            for view, copied in zip(views, copies, strict=True):
                assert (view == copied).all()
        for env in range(4):
            story = [r[0][list(ids).index(env), 0] for ids, r, _ in kept if env in ids]
            assert story == list(range(len(story)))
    finally:
        envs.close()
    assert all((r[0] == c[0]).all() for _, r, c in kept)  # also after close
    kept[0][1][0][:] = 7  # and writable


@pytest.mark.deep
def test_batches_of_parts_of_workers_are_copies_or_views_of_their_own():
    envs = counting(6, batch_size=4)
    try:
        for _ in range(50):
            *results, infos = envs.recv(timeout=DEADLINE)
            # The last env of a buffer is followed by the first one of the next.
            in_a_row = (np.diff(infos["env_id"]) % 6 == 1).all()
            if not in_a_row:
                assert not any(is_view(array) for array in results)
            envs.send(infos["env_id"], infos["env_id"])
    finally:
        envs.close()


def test_no_buffer_is_left():
    envs = counting(num_buffers=3)
    try:
        kept = []
        while True:  # one of two workers answers three times in at most five
            *results, infos = envs.recv(timeout=DEADLINE)
            kept.append(results)
            del results
            ids = infos["env_id"]
            try:
                envs.send(ids, ids)
            except BufferError as error:
                assert "all 3 buffers are held" in str(error) and "release()" in str(error)
                break
            assert len(kept) < 5
        before = [array.copy() for array in kept[0]]
        with pytest.raises(BufferError):  # nothing has changed
            envs.send(ids, ids)
        assert all((a == b).all() for a, b in zip(before, kept[0], strict=True))
        kept.clear()
        envs.send(ids, ids)
        envs.recv(timeout=DEADLINE)
    finally:
        envs.close()


@pytest.mark.deep
def test_what_was_made_of_an_array_holds_its_buffer():
    envs = counting(2, num_workers=1, num_buffers=1)
    try:
        observations, *_, infos = envs.recv(timeout=DEADLINE)
        _ = None
        part = memoryview(observations[1:].reshape(-1)[::2])
        del observations
        with pytest.raises(BufferError):
            envs.send([0, 1])
        part.release()
        del part
        envs.send([0, 1])
    finally:
        envs.close()


@pytest.mark.deep
def test_a_tensor_holds_its_buffer():
    torch = pytest.importorskip("torch")
    envs = counting(2, num_workers=1, num_buffers=1)
    try:
        observations, *_ = envs.recv(timeout=DEADLINE)
        _ = None
        address = observations.ctypes.data
        tensor = torch.from_numpy(observations)
        del observations
        assert tensor.data_ptr() == address
        with pytest.raises(BufferError):
            envs.send([0, 1])
        del tensor
        envs.send([0, 1])
    finally:
        envs.close()


def test_released_by_hand():
    envs = counting(2, num_workers=1, num_buffers=1)
    try:
        first = envs.recv(timeout=DEADLINE)
        with pytest.raises(BufferError):
            envs.send([0, 1])
        envs.release(first[1][1:])  # any of its arrays, and any part of one
        envs.send([0, 1])
        second = envs.recv(timeout=DEADLINE)
        assert second[0].ctypes.data == first[0].ctypes.data
        envs.release(first[0])  # again: nothing; the second is still held
        with pytest.raises(BufferError):
            envs.send([0, 1])
        envs.release(np.zeros(3))  # holds nothing
        with pytest.raises(TypeError, match="takes an array"):
            envs.release(second)
    finally:
        envs.close()


@pytest.mark.deep
def test_released_after_so_many_receives():
    envs = counting(2, num_workers=1, num_buffers=3, hold_batches=2)
    try:
        kept = []
        for _ in range(20):
            observations, *_ = envs.recv(timeout=DEADLINE)
            kept.append(observations)
            envs.send([0, 1])
        addresses = [array.ctypes.data for array in kept]
        assert addresses[:3] == addresses[3:6] and len(set(addresses)) == 3
        assert kept[-2][0, 0] == 18  # the last two are still what they were
    finally:
        envs.close()


@pytest.mark.deep
def test_a_cycle_does_not_keep_a_buffer():
    envs = counting(2, num_workers=1, num_buffers=1)
    gc.disable()
    try:
        for _ in range(5):
            cycle = [envs.recv(timeout=DEADLINE)]
            cycle.append(cycle)
            del cycle
            envs.send([0, 1])
    finally:
        gc.enable()
        envs.close()


@pytest.mark.deep
def test_other_calls_write_nothing_that_is_held():
    envs = ShmVectorEnv(stories(4), num_workers=2, batch_size=2, copy=False, num_buffers=2)
    try:
        envs.async_reset(seed=1)
        first, second = envs.recv(timeout=DEADLINE), envs.recv(timeout=DEADLINE)
        held = [(array, array.copy()) for batch in (first, second) for array in batch[:4]]
        reference = [Story(i) for i in range(4)]
        rows = [env.reset(seed=1 + i)[0] for i, env in enumerate(reference)]
        envs.get_attr("turns")
        observations = envs.step([5, None, None, 6])[0]
        rows[0], rows[3] = reference[0].step(5)[0], reference[3].step(6)[0]
        assert (observations == rows).all()
        envs.step_async([1, 2, 3, 4])
        observations = envs.step_wait()[0]
        rows = [env.step(action)[0] for env, action in zip(reference, [1, 2, 3, 4], strict=True)]
        assert (observations == rows).all() and not is_view(observations)
        mask = np.array([False, True, False, False])
        envs.async_reset(seed=9, options={"reset_mask": mask})
        observations, *_, infos = envs.recv(min_envs=1, timeout=DEADLINE)
        assert infos["env_id"].tolist() == [1] and observations[0, 2] == 10
        assert all((array == copied).all() for array, copied in held)
        del first, second, observations
    finally:
        envs.close()


@pytest.mark.deep
def test_a_batch_that_is_held_while_its_envs_are_stepped_by_mask():
    envs = ShmVectorEnv(stories(2), num_workers=1, batch_size=2, copy=False, num_buffers=1)
    try:
        envs.async_reset()
        held = envs.recv(timeout=DEADLINE)
        with pytest.raises(BufferError):
            envs.step([1, None])
        with pytest.raises(BufferError):
            envs.step_async([1, 1])
        del held
        assert envs.step([1, None])[1].tolist() == [1, 0]
    finally:
        envs.close()
