"""A function of several items at once, by threads, with the results in the order of the items."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor


def side_by_side(function: Callable, items: Iterable, num_at_once: int) -> Iterator[tuple]:
    """Yield each item with what the function gives for it, in order.

        items a b c d e, 2 at once    caller    a, takes a          takes b    takes c
                                      thread 1              b------>d------------>
                                      thread 2              c--------------->e------->

    The caller's thread makes the items and computes the first: a function that is compiled when it is first
    called is compiled once. Items are made a few ahead of the results that are taken, no more.

    Args:
        function: Of one item; safe to be called by several threads. It does not see what the caller's thread
            has set for itself alone, such as `jax.default_device`.
        items: Read by the caller's thread alone.
        num_at_once: Threads; 1 for none but the caller's.

    Yields:
        `(item, result)`. What the function raises is raised in its item's place, what the items raise at
        once. Then, and where the caller takes no more, what has begun is waited for and nothing else begins.
    """
    items = iter(items)
    if num_at_once == 1:
        yield from ((item, function(item)) for item in items)
        return
    for item in items:
        yield item, function(item)
        break
    begun = deque()
    threads = ThreadPoolExecutor(num_at_once, "side-by-side")
    try:
        for item in items:
            begun.append((item, threads.submit(function, item)))
            if len(begun) > num_at_once:  # one waits, so that no thread does while a result is taken
                yield _first(begun)
        while begun:
            yield _first(begun)
    finally:
        threads.shutdown(cancel_futures=True)


def _first(begun):
    item, result = begun.popleft()
    try:
        return item, result.result()
    finally:
        del result  # else what it raised would hold this frame, which holds it, and the memory of both
