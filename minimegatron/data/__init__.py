"""Tokens: from files of documents to the micro-batches of one rank. In reading order:

| module               | contents                                                                                      |
|----------------------|-----------------------------------------------------------------------------------------------|
| `tokenizer`          | text <-> ids; Hugging Face, GPT-2 BPE, bytes, and numbers that are already ids                |
| `tokenizer_files`    | a published tokenizer's folder: its files, their precedence, its chat template                |
| `tokenizer_training` | a byte-level BPE learned from texts; files for tokenizers that have no folder                 |
| `formats`            | which format a file is in, by its first bytes; how it is opened                               |
| `jsonl`              | documents of a file that may be broken, huge or malicious                                     |
| `documents`          | the same of text and Parquet                                                                  |
| `hub`                | a data set of the Hugging Face hub, or a folder like one, by its name                         |
| `encoding`           | lines of text -> ids, by workers, in order                                                    |
| `preprocess`         | files of documents -> `.bin/.idx` (`python -m minimegatron.data.preprocess`)                  |
| `index_format`       | the bytes of Megatron's `.bin/.idx`, and what is refused before they are trusted              |
| `indexed`            | `.bin/.idx`: reading, writing                                                                 |
| `indices`            | the tokens of sample k, epoch after epoch; arrays computed once for all ranks and runs        |
| `gpt_dataset`        | samples as tensors with their masks, from files or (`--mock-data`) from a rule                |
| `packing`            | samples made of whole documents, each of which sees only itself                               |
| `whole_words`        | which tokens are one word, and which words are hidden from a BERT                             |
| `bert_dataset`       | samples for BERT: pieces of documents in pairs, with hidden words                             |
| `span_corruption`    | samples for an encoder-decoder: a text without some spans, and these spans                    |
| `blend`              | several datasets in given shares                                                              |
| `builder`            | the train, valid and test sets from `--data-path` and `--split`                               |
| `loader`             | the micro-batches of one data-parallel rank; its whole state is the consumed samples          |
| `pictures`           | pictures as patches, their windows and positions, and which token each block becomes          |
| `picture_messages`   | `image_url` parts of messages: decoded, resized, and room for them among the ids              |
| `drawn`              | pictures that the program draws, with questions                                               |
| `corpus`             | a corpus on every machine without a download: Python's own standard library                   |
| `publish`            | files that appear whole or not at all                                                         |

Importing this package imports nothing: the workers of `preprocess` start without torch.
"""
