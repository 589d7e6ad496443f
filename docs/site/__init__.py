"""The website: `make site`, or `python -m docs.site`.

    repository ── generators ──> build/site/source, Markdown and notebooks ── Sphinx, myst-nb ──> build/site/html

| file           | makes                                                                                     |
|----------------|-------------------------------------------------------------------------------------------|
| `pages`        | all pages: documents and notebooks as they are, links turned to pages; the files they name |
| `reference`    | a page for each module, from its docstrings                                               |
| `counterparts` | our file, Megatron-LM's, the paper, the lab, in every direction                           |
| `questions`    | the check-lists of the quiz, with all questions and answers, in two languages              |
| `links`        | what is checked of the built site: links, and that a page asks no other machine           |
| `conf.py`      | Sphinx: theme, highlighting of labs, links from `comm/mesh` to its page                   |

Generators need the standard library alone, not torch, and of the package what puts translations in their places
(`commands/prose`); they execute no notebook. What a page says is written once, in the repository.
"""
