"""A model behind OpenAI's interface: `minimegatron serve`; and a load on it: `minimegatron bench-serve`.

| file            | one idea                                                                               |
|-----------------|----------------------------------------------------------------------------------------|
| `engine_thread` | one engine and many connections: who may come, who has left, what goes wrong           |
| `protocol`      | every field of a request, honoured or refused by name; what an answer looks like       |
| `answers`       | pieces of text into completions, whole or as server-sent events                        |
| `metrics`       | what happens, in Prometheus' form and under vLLM's names                               |
| `app`           | routes, keys, sizes, and the end                                                       |
| `http_server`   | connections: a deadline for the head of a request, files for many of them              |
| `chat.html`     | a page to talk to it                                                                   |
| `router`        | one address before N servers: who answers what, and what happens when one dies         |
| `replicas`      | the processes of these servers: started, started again, ended                          |
| `load`          | a load on a server, and what its users would have felt                                 |
| `workload`      | prompts, and when they arrive                                                          |
| `http_client`   | requests whose streams come with the moment of every piece                             |

FastAPI, uvicorn, prometheus-client and h11 are the extra `serve`.
"""
