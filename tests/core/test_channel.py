"""Control channels: messages by their numbers, whole, in spite of everything."""

import os
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import first

from shmvec._core import Channel


@pytest.fixture
def ends():
    channels = [Channel(end.detach()) for end in socket.socketpair()]
    yield channels
    for channel in channels:
        channel.close()


def test_a_message_is_found_until_it_is_taken(ends):
    mine, theirs = ends
    mine.put(7, b"seven")
    assert theirs.find(7).content == theirs.find(7).content == theirs.take(7).content == b"seven"
    assert theirs.find(7) is theirs.take(7) is None


def test_older_messages_are_dropped_and_newer_ones_wait(ends):
    mine, theirs = ends
    for number in (1, 2, 3):
        mine.put(number, str(number).encode())
    assert theirs.take(2).content == b"2"
    assert theirs.take(2) is None and theirs.take(1) is None
    assert theirs.take(3).content == b"3"


@pytest.mark.deep
@pytest.mark.parametrize("first", [2**32 - 1, 2**31 - 1, 0])
def test_numbers_wrap(ends, first):
    mine, theirs = ends
    second = (first + 1) % 2**32
    mine.put(first, b"first")
    mine.put(second, b"second")
    assert theirs.take(second).content == b"second"
    assert theirs.take(first) is None


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 400_000), max_size=8))
def test_nobody_blocks_however_much_is_sent_both_ways(sizes):
    ends = [Channel(end.detach()) for end in socket.socketpair()]
    try:
        for number, size in enumerate(sizes, 1):
            for end in ends:
                end.put(number, bytes([number]) * size)
        for _ in range(10_000):
            if not any([end.pump() for end in ends]):
                break
        for number, size in enumerate(sizes, 1):
            for end in ends:
                assert end.take(number).content == bytes([number]) * size
        assert not any(end.has_unsent for end in ends)
    finally:
        for end in ends:
            end.close()


def test_descriptors_come_with_their_message(ends):
    mine, theirs = ends
    read, write = os.pipe()
    mine.put(1, b"", [write])
    mine.put(2, b"x" * 1_000_000, [write, write])
    os.close(write)
    mine.put(3, b"none")
    message = theirs.take(1)
    assert len(message.descriptors) == 1 and not os.get_inheritable(message.descriptors[0])
    os.write(message.descriptors[0], b"hello")
    assert os.read(read, 5) == b"hello"
    os.close(message.descriptors[0])
    while mine.has_unsent:
        mine.pump(), theirs.pump()
    assert theirs.take(3).content == b"none"  # the second is discarded, and its descriptors closed
    os.set_blocking(read, False)
    assert os.read(read, 1) == b""  # the writing end is closed everywhere
    os.close(read)


@pytest.mark.deep
def test_more_descriptors_than_a_message_holds(ends):
    with pytest.raises(ValueError, match="at most 64 descriptors"):
        ends[0].put(1, b"", [0] * 65)
    assert not ends[0].has_unsent


def test_what_was_said_is_read_after_the_other_end_has_gone(ends):
    mine, theirs = ends
    theirs.put(1, b"last words")
    theirs.put(2, b"goodbye", (), True)
    theirs.close()
    mine.put(1, b"to nobody")
    assert not mine.has_unsent
    assert mine.take(1).content == b"last words"
    assert mine.take(2) is None  # no answer
    assert mine.goodbye_content == b"goodbye"
    mine.pump()
    assert mine.broken == "the other end was closed"


@pytest.mark.parametrize("noise", first([b"x" * 24, b"vmhs" + b"\xff" * 20]))
def test_noise_is_no_message(noise):
    raw, end = socket.socketpair()
    channel = Channel(end.detach())
    raw.sendall(noise)
    assert channel.take(1) is None
    assert channel.broken == "what came through it is no message"
    channel.close()
    raw.close()


def test_a_message_that_is_cut_short(ends):
    mine, theirs = ends
    mine.put(1, b"x" * 1_000_000)
    theirs.pump()
    mine.close()
    while theirs.pump():
        pass
    assert theirs.take(1) is None and theirs.broken == "the other end was closed"


@pytest.mark.deep
def test_closed(ends):
    mine, theirs = ends
    mine.put(1, b"x" * 1_000_000, [0])
    mine.close()
    mine.close()
    assert mine.take(1) is None and not mine.has_unsent and mine.broken == "it was closed"


def test_a_closed_channel_takes_no_descriptors(ends):
    mine, _ = ends
    mine.close()
    reader, writer = os.pipe()
    mine.put(1, b"too late", [writer])
    os.close(writer)
    assert os.read(reader, 1) == b""  # nobody else has the other end
    os.close(reader)
