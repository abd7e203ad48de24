"""Many readers of one prefix: the numbers by which `check` looks at shared slots once for all rows of a forward.

A long forward's readable places are taken in spans of a row, of up to `SPAN_TILES` tiles. The leader of a span is the
first row whose table has the same entry at the span's last place, of those that read beyond the span. A later row
follows the leader where nothing that is judged of the span can differ: the entries of all places and of the place
before, the requests' own tokens, and at position 0 the anchors. A row that follows reads its table and no record. A
leader that finds something wrong or unknown judges it once more for each row that follows, with that row's writer. So
findings and counts are those of a check row by row, and nothing is passed between the programs of a launch.

The end of a row is its own, since the final hash of its request is compared there. Rows that fork within a span each
look at all of it, and so does a row with the leader's last entry and another one before. No row follows another in
windows and rings, whose places differ from row to row; in forwards of more than `MOST_ROWS` rows, where the search for
leaders would cost more than it saves; under a budget (``CANARY_CHECK_BUDGET``), where a leader may rest; and in
forwards of fewer than ``2 * SPANS`` tiles, which have too few spans to fill a device.
"""

SPANS = 2048
"""Fewest spans of a forward: as many as a device's programs take in three rounds."""

SPAN_TILES = 8
"""Most tiles of a span. One program looks at a leader's: with more of them the rest of a device waits for it."""

MOST_ROWS = 1024
"""Most rows of a forward with spans; one of `kernels.launch.ROW_STEPS`."""
