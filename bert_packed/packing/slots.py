"""Assignment of sequences to slots: a slot holds any sequence that is not longer.

Packs are planned in slots (column generation, least squares), and slots may outnumber sequences of their
size. Since slots are nested, filling longest sequences first, each into the shortest free slot that holds
it, fills as many as any assignment can. Rows are sizes of slots and lengths of sequences, ascending; `demand`
is a list of the sequences by row.
"""

from collections import Counter


def uncovered(num_slots, demand):
    """The sequences by row that find no slot when as many as possible do.

    Rows of sizes 2 3 5, slots 0 1 2, demand 2 2 0: two of size 3 and one of size 2 are in, left over 1 0 0.
    """
    return _contents(num_slots, demand)[1]


def count_slots(packs, num_rows):
    """Slots by row of `(rows, count)` pairs."""
    slots = [0] * num_rows
    for pack, count in packs:
        for row in pack:
            slots[row] += count
    return slots


def place(pack, demand):
    """Fill each slot of one pack from `demand`, in place; False, and no change, unless all can be filled."""
    placed = []
    row = len(demand)
    for slot in reversed(pack):
        row = min(row, slot)
        while row >= 0 and demand[row] == 0:
            row -= 1
        if row < 0:
            for taken in placed:
                demand[taken] += 1
            return False
        demand[row] -= 1
        placed.append(row)
    return True


def fill_slots(packs, demand):
    """Turn packs of slots, `(ascending tuple of rows, count)`, into packs of sequences, or empty ones."""
    contents, left_over = _contents(count_slots(packs, len(demand)), demand)
    if any(left_over):
        row = max(row for row, left in enumerate(left_over) if left)
        raise ValueError(
            f"the slots must hold every sequence. Received: {left_over[row]} too many in row {row}."
        )
    filled = []
    for pack, count in packs:
        groups = [((), count)]
        for slot in pack:
            groups = _fill_one(groups, contents[slot])
        merged = Counter()
        for rows, num in groups:
            merged[tuple(sorted(rows))] += num
        filled.extend(merged.items())
    return filled


def _contents(num_slots, demand):
    """`[row put in or None, count]` by slot size, to use from the end; sequences left over by row."""
    contents, left_over = [[] for _ in demand], list(demand)
    free = []  # [slot, count], the shortest slot last
    for row in range(len(demand) - 1, -1, -1):
        if num_slots[row]:
            free.append([row, num_slots[row]])
        while left_over[row] and free:
            slot, num = free[-1]
            filled = min(num, left_over[row])
            contents[slot].append([row, filled])
            left_over[row] -= filled
            free[-1][1] -= filled
            if filled == num:
                free.pop()
    for slot, num in free:
        contents[slot].append([None, num])
    return contents, left_over


def _fill_one(groups, content):
    """Fill one slot in each pack of each group, splitting a group where the content changes."""
    result = []
    for rows, count in groups:
        while count:
            row, num = content[-1]
            used = min(num, count)
            result.append((rows if row is None else (*rows, row), used))
            content[-1][1] -= used
            if used == num:
                content.pop()
            count -= used
    return result
