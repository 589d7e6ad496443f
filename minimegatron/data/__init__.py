"""Tokens: from a JSONL file to the micro-batches of one rank. In reading order:

| module        | one idea                                                                                             |
|---------------|------------------------------------------------------------------------------------------------------|
| `tokenizer`   | text <-> ids; Hugging Face, GPT-2 BPE, bytes, and numbers that are already ids                       |
| `tokenizer_files` | what the files of a published tokenizer say, and which is believed                               |
| `chat`        | a conversation as one text, in the form that a model was trained on                                  |
| `jsonl`       | documents out of a file that may be broken, huge or hostile                                          |
| `formats`     | what a file is, by its first bytes                                                                   |
| `encode`      | lines to ids, in this process or in many, in order                                                   |
| `preprocess`  | JSONL -> `.bin/.idx` with many workers, in order (`python -m minimegatron.data.preprocess`)          |
| `indexed`     | reading and writing Megatron's `.bin/.idx`; its bytes are in `indexed_format`                        |
| `indices`     | which tokens make sample k: document, sample and shuffle index                                       |
| `epochs`      | the same for epoch after epoch, each in an order of its own                                          |
| `masking`     | loss mask, position ids and document ids of a batch                                                  |
| `gpt_dataset` | samples as tensors, from files or (`--mock-data`) from a rule                                        |
| `packing`     | samples made of whole documents, each of which sees only itself                                      |
| `index_cache` | index arrays computed once for all ranks and all runs                                                |
| `blend`       | several datasets in given shares                                                                     |
| `builder`     | the train, valid and test sets from `--data-path` and `--split`                                      |
| `loader`      | the micro-batches of one data-parallel rank; its whole state is (seed, consumed samples)             |
| `corpus`      | a corpus on every machine without a download: Python's own standard library                          |
| `long_work`   | a bar for what takes long                                                                            |
| `publish`     | files that appear whole or not at all                                                                |

Importing this package imports nothing: the workers of `preprocess` start without torch.
"""
