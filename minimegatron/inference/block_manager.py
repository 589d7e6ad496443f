"""Who has which page: a free list, a count of users for each page, and pages that are found again by their tokens.

The problem in a sentence: a thousand requests begin with the same system prompt, and its keys and values need to be
computed and kept once.

A page holds the keys and values of `page_size` consecutive tokens. What they are depends on these tokens *and on all
before them*, so a full page is known by (its parent, its tokens):

    root        (version of the weights, salt)
    page 7      (root, tokens 0 .. 15)                    serial 41
    page 2      (41,   tokens 16 .. 31)                   serial 42

Each content that is known has a serial number of its own, never used again, and the next page names it as its parent:
the chain is exact. The table is a dictionary that compares tokens, so two contents whose hashes collide are still two.
From another root nothing old is found: what other weights or another adapter have made is out of reach, and goes when
room is needed.

    users of a page      0          1         2 ...
    in no table          free       owned     shared (a fork), copied before anybody writes
    in the table         reusable   owned     shared

A page without users that is in the table stays there until room is needed: the one unused for longest goes first
(its children are unreachable from then on, and go the same way). The last token of a sequence is always computed anew,
because its logits are needed.

Page 0 belongs to nobody: rows that pad a batch are written there.

Kwon et al. 2023 (arXiv 2309.06180), sections 4.2 and 4.4. Megatron-LM:
`megatron/core/inference/contexts/dynamic_block_allocator.py`.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence as Items

from minimegatron.errors import ConfigError

Parent = int | tuple[int, str]  # serial of the page before, or the root
Content = tuple[Parent, tuple[int, ...]]


class BlockManager:
    """The pages of one engine.

    Args:
        num_pages: pages there are, page 0 among them.
        page_size: tokens of a page.
        reuse: whether pages are found again by their tokens.

    Attributes:
        hits, asked: tokens of admitted sequences that were found in pages, and all that were looked for.
        evicted: pages whose tokens were forgotten because room was needed.

    Raises:
        ConfigError: no page that somebody can have.
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
        """Pages that can be had now."""
        return len(self._free) + len(self._reusable)

    @property
    def capacity(self) -> int:
        """Pages that one sequence can have at most."""
        return self.num_pages - 1

    def users(self, page: int) -> int:
        """How many sequences have a page."""
        return self._users[page]

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens need."""
        return -(-tokens // self.page_size)

    def find(self, tokens: Items[int], root: Parent) -> tuple[list[int], Parent]:
        """The pages that hold the beginning of a sequence, whole pages only and never its last token.

        Returns:
            The pages, whose users are as before (`share`), and the parent of the page behind them.
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
        """One user more."""
        if self._users[page] == 0:
            del self._reusable[page]
        self._users[page] += 1

    def take(self) -> int:
        """A page that nobody has; see `available`.

        Raises:
            IndexError: there is none.
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
        """One user less; without users it is free, or waits to be found again."""
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
        """Full pages of a sequence can be found from now on.

        Args:
            tokens, pages: of the sequence.
            upto: how many tokens are computed.
            looked_at: how many pages were remembered or found before.
            parent: of the page behind these.

        Returns:
            `looked_at` and `parent` for the next call.
        """
        size = self.page_size
        for i in range(looked_at, upto // size if self.reuse else 0):
            content = (parent, tuple(tokens[i * size : (i + 1) * size]))
            if content not in self._known:  # otherwise another sequence has computed the same: its page is found
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
        """Every page is free, reusable, or has as many users as tables name it.

        Raises:
            AssertionError: one is lost, counted wrongly, or two things at once.
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
