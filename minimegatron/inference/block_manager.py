"""The page allocator: a free list, a reference count for each page, and prefix caching.

The problem in a sentence: a thousand requests begin with the same system prompt, and its keys and values should be
computed and stored once.

A page holds the keys and values of `page_size` consecutive tokens. These depend on the page's tokens *and on all tokens
before them*, so a full page is identified by its content, (parent, tokens):

    root        (version of the weights, adapter, salt)
    page 7      (root, tokens 0 .. 15)                    serial 41
    page 2      (41,   tokens 16 .. 31)                   serial 42

Each content gets a serial number that is never reused, and the next page names it as its parent. The table from content
to page compares the tokens themselves, so a collision of hashes cannot mix up two contents. Another version of the
weights, another adapter or another salt (of a tenant) is another root, under which no older page is found.

    users of a page      0          1         2 ...
    not in the table     free       owned     shared by forks; copied before it is written
    in the table         reusable   owned     shared

A page without users stays in the table until its room is needed; then the least recently used one is evicted. Pages
whose parent was evicted can no longer be found, and are evicted in their turn. The last token of a sequence is always
computed, because its logits are needed.

Page 0 is never assigned: the rows that pad a batch write there.

Kwon et al. 2023 (arXiv 2309.06180), sections 4.2 and 4.4. Megatron-LM:
`megatron/core/inference/contexts/dynamic_block_allocator.py`.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence as Items

from minimegatron.errors import ConfigError

Parent = int | tuple[int, str, str]  # serial of the page before, or the root
Content = tuple[Parent, tuple[int, ...]]


class BlockManager:
    """The pages of one engine.

    Args:
        num_pages: number of pages, page 0 included.
        page_size: tokens of a page.
        reuse: whether full pages are entered into the table (prefix caching).

    Attributes:
        hits, asked: tokens of admitted sequences that were found in pages, and tokens that were looked up.
        evicted: pages that were removed from the table to make room.

    Raises:
        ConfigError: fewer than 2 pages, or a page without a token.
    """

    def __init__(self, num_pages: int, page_size: int, reuse: bool = True) -> None:
        if num_pages < 2 or page_size < 1:
            raise ConfigError(f"{num_pages} pages of {page_size} tokens", fix="at least 2 pages (one is for padding)")
        self.num_pages, self.page_size, self.reuse = num_pages, page_size, reuse
        self.hits = self.asked = self.evicted = 0
        self._users = [0] * num_pages
        self._free = collections.deque(range(1, num_pages))
        self._reusable: collections.OrderedDict[int, None] = collections.OrderedDict()  # longest unused first
        self._known: dict[Content, int] = {}
        self._content: dict[int, Content] = {}  # of pages that are in the table
        self._serial: dict[int, int] = {}
        self._serials = 0

    @property
    def available(self) -> int:
        """Pages that `take` can give now: free and reusable ones."""
        return len(self._free) + len(self._reusable)

    @property
    def capacity(self) -> int:
        """Pages without page 0, the most that one sequence can have."""
        return self.num_pages - 1

    def users(self, page: int) -> int:
        """Number of sequences that hold a page."""
        return self._users[page]

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens need."""
        return -(-tokens // self.page_size)

    def find(self, tokens: Items[int], root: Parent) -> tuple[list[int], Parent]:
        """Look up the pages that hold the beginning of a sequence: full pages only, and never its last token.

        Returns:
            The pages (not yet counted as used, see `share`), and the parent of the page after them.
        """
        found: list[int] = []
        size, parent = self.page_size, root
        for start in range(0, len(tokens) - size, size):
            page = self._known.get((parent, tuple(tokens[start : start + size])))
            if page is None:
                break
            found.append(page)
            parent = self._serial[page]
        return found, parent

    def share(self, page: int) -> None:
        """Count one more user of a page."""
        if self._users[page] == 0:
            del self._reusable[page]
        self._users[page] += 1

    def take(self) -> int:
        """Assign a page that has no user, evicting one from the table if none is free.

        Raises:
            IndexError: there is none (`available` is 0).
        """
        if self._free:
            page = self._free.popleft()
        else:
            if not self._reusable:
                raise IndexError("no page is free")
            page, _ = self._reusable.popitem(last=False)
            self._forget(page)
            self.evicted += 1
        self._users[page] = 1
        return page

    def release(self, page: int) -> None:
        """Count one user less of a page; without users it is free, or reusable if it is in the table."""
        assert self._users[page] > 0, f"page {page} is freed twice"
        self._users[page] -= 1
        if self._users[page] == 0:
            if page in self._content:
                self._reusable[page] = None
            else:
                self._free.append(page)

    def remember(
        self, tokens: Items[int], pages: Items[int], upto: int, looked_at: int, parent: Parent
    ) -> tuple[int, Parent]:
        """Enter the full pages of a sequence into the table.

        Args:
            tokens, pages: of the sequence.
            upto: number of its computed tokens.
            looked_at: number of its pages that were entered or found before.
            parent: of the page after these.

        Returns:
            `looked_at` and `parent` for the next call.
        """
        size = self.page_size
        for i in range(looked_at, upto // size if self.reuse else 0):
            content = (parent, tuple(tokens[i * size : (i + 1) * size]))
            if content not in self._known:  # else another sequence computed the same, and its page stays in the table
                self._serials += 1
                self._known[content], self._content[pages[i]] = pages[i], content
                self._serial[pages[i]] = self._serials
            parent = self._serial[self._known[content]]
            looked_at = i + 1
        return looked_at, parent

    def _forget(self, page: int) -> None:
        del self._known[self._content.pop(page)]
        del self._serial[page]

    def check(self, tables: Items[Items[int]]) -> None:
        """Check that every page is free, reusable, or has as many users as block tables name it; for tests.

        Raises:
            AssertionError: a page is lost, counted wrongly, or in two states.
        """
        counted = collections.Counter(page for table in tables for page in table)
        free, reusable = set(self._free), set(self._reusable)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & reusable and 0 not in counted and 0 not in free, "a page is two things at once"
        for page in range(1, self.num_pages):
            assert self._users[page] == counted[page], f"page {page} has {counted[page]} users, not {self._users[page]}"
            assert (page in free or page in reusable) == (counted[page] == 0), (
                f"page {page} is lost, or free and in use"
            )
        assert set(self._known.values()) == set(self._content) and len(self._known) == len(self._content)
