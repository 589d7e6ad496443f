"""Files of documents to `.bin/.idx`: tokenise a corpus once, with many workers, in order.

    python -m minimegatron.data.preprocess --input corpus.jsonl --output-prefix corpus --append-eod
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model folder --workers 8

writes `corpus_text_document.bin`, `.idx` and the sidecar `.json`; one set for each of `--json-keys`. The flags are
those of Megatron-LM's `tools/preprocess_data.py`, and so are the bytes.

The reader hands out batches of lines, workers tokenise them (`data/encoding`), and the writer takes the results in the
order of the lines. Nothing is visible under the final names before all of it is written; an error, Ctrl-C or a killed
worker leaves nothing behind.

A line that cannot be used (see `jsonl`) stops the run with its number; `--on-bad-line skip` goes on, and the summary
says how many lines were skipped for which reason, and where the first of them is.
A document without text becomes a document without tokens, as in Megatron.

**Special tokens.** `<|im_start|>` in a document is read as letters, not as the token, since its writer is a stranger;
the summary counts such documents. Conversations that a chat template has spelled ask for
`--no-split-special-tokens`, and for `--no-add-special-tokens` where the template begins with bos itself.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import glob
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from minimegatron.bars import tqdm
from minimegatron.data.documents import SEPARATOR, ParquetReader, reader_of
from minimegatron.data.encoding import Encoded, Encoder, Encoding
from minimegatron.data.indexed import IndexedDatasetBuilder, optimal_dtype
from minimegatron.data.jsonl import MAX_LINE_BYTES, JsonlReader, Line
from minimegatron.data.tokenizer import TOKENIZERS
from minimegatron.errors import ConfigError, DataError, MinimegatronError, did_you_mean
from minimegatron.flags import Parser
from minimegatron.launch.procs import usable_cores

BATCH_LINES, BATCH_BYTES = 256, 1 << 20


@dataclasses.dataclass
class Summary:
    """Counts of a run.

    Attributes:
        prefixes: key -> prefix of its `.bin/.idx`.
        documents, empty_documents, tokens: over all keys.
        skipped_lines, blank_lines: of the input.
        reasons: why lines were skipped: what was wrong -> how often, and the place of the first.
        spelled: special tokens that documents contain as letters, and how often.
        split: whether these are read as letters; otherwise as tokens.
        twice: documents that begin with two bos tokens.
    """

    prefixes: dict[str, str]
    documents: int = 0
    empty_documents: int = 0
    tokens: int = 0
    skipped_lines: int = 0
    blank_lines: int = 0
    reasons: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    spelled: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    split: bool = True
    twice: int = 0

    def __str__(self) -> str:
        lines = [
            f"{self.documents:,} documents ({self.empty_documents:,} empty), {self.tokens:,} tokens in "
            f"{', '.join(self.prefixes.values())} (.bin, .idx); "
            f"{self.skipped_lines:,} bad lines skipped, {self.blank_lines:,} blank lines"
        ]
        for reason, (count, first) in sorted(self.reasons.items(), key=lambda item: -item[1][0]):
            lines.append(f"skipped: {reason}: {count:,}, the first at {first}")
        if self.spelled:
            most = ", ".join(f"{text} {count:,}" for text, count in self.spelled.most_common(5))
            more = f", and {len(self.spelled) - 5} others" if len(self.spelled) > 5 else ""
            other = "letters; --no-split-special-tokens reads tokens" if self.split else "tokens"
            lines.append(f"documents spell special tokens ({most}{more}), read as {other}")
        if self.twice:
            lines.append(f"{self.twice:,} documents begin with bos twice; --no-add-special-tokens adds none")
        return "\n".join(lines)


def preprocess(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer: Mapping[str, Any],
    *,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int = 1,
    on_bad_line: str = "error",
    max_line_bytes: int = MAX_LINE_BYTES,
    separator: str = SEPARATOR,
    progress: bool = False,
    log_interval: int = 0,
) -> Summary:
    """Tokenise files, one after the other, into one dataset a key.

    Args:
        inputs: files of documents (`documents`): JSONL, text, Parquet; plain or compressed.
        output_prefix: the datasets are `<prefix>_<key>_document`.
        tokenizer: arguments of `build_tokenizer`.
        json_keys: keys whose values, text or lists of texts (a sequence each), are tokenised.
        append_eod: end each document with the end-of-document id.
        workers: processes; 1 works in this one.
        on_bad_line: "error" or "skip".
        max_line_bytes: a longer line, or a longer document of a text file, is a bad line.
        separator: the line between two documents of a text file.
        progress: show a bar on stderr, if that is a terminal.
        log_interval: also print a line on stderr every so many documents; 0 for none.

    Raises:
        ConfigError: arguments that are not possible.
        DataError: a bad line, a file that cannot be read, or no document at all.
        RankError: a worker died. DeadlineError: one took more than ten minutes for a megabyte.
    """
    if on_bad_line not in ("error", "skip") or workers < 1 or len(set(json_keys)) != len(json_keys) or not json_keys:
        raise ConfigError(
            f"on_bad_line {on_bad_line!r}, workers {workers}, json_keys {list(json_keys)}",
            fix="on_bad_line error or skip, workers >= 1, and at least one key, each once",
        )
    summary = Summary({key: f"{os.fspath(output_prefix)}_{key}_document" for key in json_keys})
    readers = [functools.partial(reader_of, path, json_keys, max_line_bytes, separator) for path in inputs]
    total, log = _size(inputs, readers), _Log(log_interval)
    summary.split = tokenizer.get("split_special_tokens") is not False
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=total, unit="B", unit_scale=True, disable=None if progress else True))
        encoding = Encoding(tuple(tokenizer.items()), tuple(json_keys), append_eod)
        encoder = stack.enter_context(Encoder(encoding, workers))
        dtype = optimal_dtype(encoder.tokenizer.vocab_size)
        builders = [
            stack.enter_context(IndexedDatasetBuilder(f"{prefix}.bin", dtype, encoder.tokenizer))
            for prefix in summary.prefixes.values()
        ]
        for open_reader in readers:
            reader = open_reader()
            for result in encoder.encode(_batches(reader, bar)):
                _write(result, builders, summary, reader, on_bad_line)
                log.step(summary)
            summary.blank_lines += reader.blank_lines
        for builder, prefix in zip(builders, summary.prefixes.values(), strict=True):
            builder.finalize(f"{prefix}.idx")
    return summary


Reader = JsonlReader | ParquetReader


def _size(paths: Sequence[str | os.PathLike[str]], readers: Sequence[Callable[[], Reader]]) -> int:
    """Bytes of all inputs of this machine; refuses one that cannot be read before any work is done."""
    for path, open_reader in zip(paths, readers, strict=True):
        if os.path.isfile(path) or not os.path.exists(path):  # what was read of a pipe is gone
            open_reader().close()
    return sum(os.path.getsize(path) for path in paths if os.path.exists(path))


def _write(
    result: Encoded, builders: Sequence[IndexedDatasetBuilder], summary: Summary, reader: Reader, on_bad_line: str
) -> None:
    if result.error and on_bad_line == "error":
        fix = "mend the line, or give --on-bad-line skip to leave such lines out"
        raise DataError(result.error, where=f"{reader.path}:{result.line}", fix=fix)
    if result.error:
        reason = re.split("[:;]", result.error)[0]  # without the values
        count, first = summary.reasons.get(reason, (0, f"{reader.path}:{result.line}"))
        summary.reasons[reason] = (count + 1, first)
        summary.skipped_lines += 1
    summary.spelled.update(result.spelled)
    summary.twice += result.twice
    for builder, (ids, lengths) in zip(builders, result.documents, strict=False):
        builder.add_document(ids, lengths)
        summary.documents += 1
        summary.empty_documents += not lengths
        summary.tokens += len(ids)


def _batches(reader: Reader, bar: tqdm) -> Iterator[list[Line]]:
    """Lines in batches of at most 256 lines, and of at most 1 MiB unless one line is longer."""
    batch: list[Line] = []
    size = position = 0
    for line in reader:
        batch.append(line)
        size += len(line.data or b"")
        if len(batch) == BATCH_LINES or size >= BATCH_BYTES:
            yield batch
            bar.update(line.position - position)
            batch, size, position = [], 0, line.position
    if batch:
        yield batch
        bar.update(batch[-1].position - position)


class _Log:
    """A line on stderr every `interval` documents."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.start = time.monotonic()
        self.printed = 0

    def step(self, summary: Summary) -> None:
        if self.interval and summary.documents // self.interval > self.printed:
            self.printed = summary.documents // self.interval
            seconds = time.monotonic() - self.start
            rate = f"{summary.documents / seconds:,.0f} documents/s, {summary.tokens / seconds:,.0f} tokens/s"
            print(f"processed {summary.documents:,} documents ({rate})", file=sys.stderr)


# ------------------------------------------------------------------------------------ command line


def _parser() -> argparse.ArgumentParser:
    parser = Parser("minimegatron preprocess", description="files of documents to .bin/.idx", allow_abbrev=False)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        help="JSONL, text or Parquet, plain or compressed (gzip, xz, bzip2, zstd), or hf://datasets/OWNER/NAME/FILE; "
        "patterns like 'part-*.jsonl' in sorted order",
    )
    add("--output-prefix", required=True, help="writes PREFIX_KEY_document.bin and .idx")
    add("--json-keys", nargs="+", default=["text"], help="keys whose text is taken (default: text)")
    add("--tokenizer-type", required=True, help=f"one of {', '.join(TOKENIZERS)}")
    add("--tokenizer-model", help="folder of HuggingFaceTokenizer")
    add("--vocab-size", type=int, help="of NullTokenizer")
    add("--vocab-file", help="vocab.json of GPT2BPETokenizer")
    add("--merge-file", help="merges.txt of GPT2BPETokenizer")
    yes_or_no = argparse.BooleanOptionalAction
    split = "special tokens that a document spells are letters (default) or, with --no-, tokens"
    add("--split-special-tokens", action=yes_or_no, help=split)
    begin = "each text gets what the tokenizer adds, Llama's <s> for example (default), or nothing"
    add("--add-special-tokens", action=yes_or_no, help=begin)
    add("--append-eod", action="store_true", help="end each document with the end-of-document id")
    add("--workers", type=int, default=usable_cores(), help="processes (default: all cores)")
    add("--on-bad-line", choices=("error", "skip"), default="error", help="stop at a bad line, or count and skip it")
    add("--max-line-mb", type=int, default=MAX_LINE_BYTES >> 20, help="longest line in MiB (default: %(default)s)")
    add("--document-separator", default=SEPARATOR, help="line between documents of a text file (default: %(default)s)")
    plan = parser.add_argument_group("a planned run: how many epochs of these tokens it reads")
    for name in ("--train-iters", "--global-batch-size", "--seq-length"):
        plan.add_argument(name, type=int, metavar="N", help="of train")
    add("--log-interval", type=int, default=0, help="a line on stderr every so many documents (default: none)")
    add("--partitions", type=int, help="changes nothing: one stream feeds all workers, at any file size")
    add("--keep-sequential-samples", action="store_true", help="changes nothing: the order is always kept")
    add("--split-sentences", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status of `errors`."""
    try:
        print(_run(argv))
        return 0
    except MinimegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {DataError(str(error))}", file=sys.stderr)
        return DataError.exit_code
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130


def _run(argv: Sequence[str] | None) -> str:
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        near = did_you_mean(unknown[0], [option for action in parser._actions for option in action.option_strings])
        raise ConfigError(f"unknown option {unknown[0]}", fix=near or "see --help")
    if args.split_sentences:
        fix = "split beforehand and give each document's value as a list of sentences: each becomes a sequence"
        raise ConfigError("--split-sentences is not supported (it needs NLTK's pickled models)", fix=fix)
    if args.partitions is not None or args.keep_sequential_samples:
        print("note: --partitions and --keep-sequential-samples change nothing; the order is kept", file=sys.stderr)
    planned = (args.train_iters, args.global_batch_size, args.seq_length)
    if any(planned) and not all(planned):
        fix = "a planned run has all three: --train-iters, --global-batch-size and --seq-length"
        raise ConfigError("one of the three numbers of a planned run is missing", fix=fix)
    names = "tokenizer_type tokenizer_model vocab_size vocab_file merge_file add_special_tokens split_special_tokens"
    summary = preprocess(
        [path for pattern in args.input for path in _expand(pattern)],
        args.output_prefix,
        {name: getattr(args, name) for name in names.split()},
        json_keys=args.json_keys,
        append_eod=args.append_eod,
        workers=args.workers,
        on_bad_line=args.on_bad_line,
        max_line_bytes=args.max_line_mb << 20,
        progress=True,
        separator=args.document_separator,
        log_interval=args.log_interval,
    )
    return f"{summary}\n{epochs(summary.tokens, *planned)}" if all(planned) else str(summary)


def epochs(tokens: int, iterations: int, samples: int, length: int) -> str:
    """How often a run reads the tokens, in words.

    Args:
        tokens: of the data.
        iterations: of the run.
        samples: of an iteration.
        length: tokens of a sample.
    """
    read = iterations * samples * length
    return (
        f"a run of {iterations:,} steps of {samples:,} samples of {length:,} tokens reads {read:,} tokens: "
        f"{read / max(1, tokens):.3g} epochs, before --split takes its share for validation"
    )


def _expand(pattern: str) -> list[str]:
    return [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern)) or [pattern]


if __name__ == "__main__":
    sys.exit(main())
