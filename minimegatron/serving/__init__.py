"""A model behind OpenAI's interface: `minimegatron serve`.

| file            | one idea                                                                               |
|-----------------|----------------------------------------------------------------------------------------|
| `engine_thread` | one engine and many connections: who may come, who has left, what goes wrong           |
| `protocol`      | every field of a request, honoured or refused by name; what an answer looks like       |
| `answers`       | pieces of text into completions, whole or as server-sent events                        |
| `metrics`       | what happens, in Prometheus' form and under vLLM's names                               |
| `app`           | routes, keys, sizes, and the end                                                       |
| `chat.html`     | a page to talk to it                                                                   |

FastAPI, uvicorn and prometheus-client are the extra `serve`.
"""
