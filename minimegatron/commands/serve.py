"""`minimegatron serve`: serve a published model, or a checkpoint of a run, behind OpenAI's HTTP interface.

    minimegatron serve FOLDER                                                       http://127.0.0.1:8000
    minimegatron serve FOLDER --host 0.0.0.0 --api-key-file key.txt                 for other machines
    torchrun --standalone --nproc-per-node 2 -m minimegatron serve FOLDER           2 ranks (tp2)

FOLDER is what `minimegatron generate` reads. Any client for OpenAI works (`base_url="http://127.0.0.1:8000/v1"`), and
`/` is a chat page. Sampling parameters that a request leaves open (temperature, top_k, top_p, min_p,
repetition_penalty) come from `generation_config.json`, else they are OpenAI's defaults; `--generation-config none`
ignores the file.

Without `--host` only this machine can connect; to serve other machines a key is required. Everybody on this machine
can see a key on the command line, so `--api-key-file` reads it from a file.

`--lora-modules NAME=FOLDER ...` serves adapters of PEFT beside the model, from one copy of its weights: a request names
one as its `model`.

After the first SIGTERM or Ctrl-C open requests may finish (`--drain-timeout`); a second one ends the server at once.

Under torchrun rank 0 serves and the other ranks compute with it, by default as one tensor-parallel group.
`--data-parallel-size N` starts N such servers, without torchrun, and a router in front of them (docs/serving.md).
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimegatron.commands.speculation import add_speculative_config, load_draft, speculative_of
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.flags import Parser

if TYPE_CHECKING:
    from minimegatron.serving.app import Server

EXTRA = "pip install 'minimegatron[serve]', or fastapi, uvicorn and prometheus-client by themselves"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        ConfigError: an unknown flag or value, or other machines without a key.
    """
    parser = Parser(
        prog="minimegatron serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path)
    add("--tokenizer-model", type=Path, metavar="FOLDER", help="default: the model's")
    add("--ckpt-step", type=int, metavar="N", help="step of a checkpoint (default: the newest)")
    add("--served-model-name", metavar="NAME", help="the `model` that requests name (default: the folder's name)")
    lora = "adapters of PEFT beside the model; a request names one as its `model`"
    add("--lora-modules", nargs="+", default=[], metavar="NAME=FOLDER", help=lora)
    add("--enable-lora", action="store_true", help="vLLM's switch, which --lora-modules implies")
    add("--host", default="127.0.0.1", help="(default: %(default)s)")
    add("--port", type=int, default=8000, metavar="N", help="0: any free port (default: %(default)s)")
    add("--api-key", metavar="KEY", help="key that requests send as `Authorization: Bearer KEY`")
    add("--api-key-file", type=Path, metavar="PATH", help="a file that holds the key")
    add("--max-model-len", type=int, metavar="N", help="longest prompt and answer (default: the model's positions)")
    add("--max-num-seqs", type=int, default=32, metavar="N", help="answers that run at once (default: %(default)s)")
    batch = "most tokens of a step (default: %(default)s)"
    add("--max-num-batched-tokens", type=int, default=512, metavar="N", help=batch)
    add("--block-size", type=int, default=16, metavar="N", help="tokens of a page (default: %(default)s)")
    pages = "default: enough for max-num-seqs answers of max-model-len"
    add("--num-gpu-blocks-override", type=int, metavar="N", help=f"number of pages, on a CPU too ({pages})")
    add("--kv-cache-memory-bytes", type=int, metavar="N", help=f"bytes of all pages of a rank ({pages})")
    prefix = "share the pages of equal beginnings"
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help=prefix)
    add("--max-queue", type=int, default=256, metavar="N", help="most answers that wait (default: %(default)s)")
    add("--request-timeout", type=float, default=600.0, metavar="S", help="longest request (default: %(default)s)")
    add("--max-body-bytes", type=int, default=4 << 20, metavar="N", help="of a request (default: %(default)s)")
    drain = "time for open requests after the first signal (default: %(default)s)"
    add("--drain-timeout", type=float, default=10.0, metavar="S", help=drain)
    add("--generation-config", choices=["auto", "none"], default="auto", help="auto: defaults of that file")
    stop = "ids that end an answer; without an id none does (default: those in the model's files)"
    add("--stop-token-ids", type=int, nargs="*", metavar="N", help=stop)
    add("--params-dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the weights (default: fp32)")
    add("--tensor-model-parallel-size", type=int, metavar="N", help="default: all ranks that pp and ep leave")
    add("--pipeline-model-parallel-size", type=int, default=1, metavar="N", help="stages (default: %(default)s)")
    add("--expert-model-parallel-size", type=int, default=1, metavar="N", help="(default: %(default)s)")
    add("--data-parallel-size", type=int, default=1, metavar="N", help="servers behind one address (default: 1)")
    add_speculative_config(parser)
    args = parser.parse_args(argv)
    for name in (
        "data_parallel_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "block_size",
        "request_timeout",
        "max_body_bytes",
    ):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: at least 1")
    for name in ("max_queue", "drain_timeout", "port"):
        if getattr(args, name) < 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: at least 0")
    args.lora_modules = adapters_of(args)
    if args.api_key_file is not None:
        args.api_key = read_key(args)
    if args.api_key is not None and not (args.api_key.isascii() and args.api_key.isprintable() and args.api_key):
        raise ConfigError("the API key is empty, or has letters that no header can hold", fix="ASCII without blanks")
    if args.api_key is None and not is_loopback(args.host):
        raise ConfigError(
            f"--host {args.host} without a key: whoever reaches this machine could use the model",
            fix="--api-key-file PATH, or --host 127.0.0.1",
        )
    return args


def adapters_of(args: argparse.Namespace) -> dict[str, Path]:
    """name -> folder of `--lora-modules`.

    Raises:
        ConfigError: a word is no NAME=FOLDER, a name is given twice or is the model's; or `--enable-lora` alone.
    """
    found: dict[str, Path] = {}
    for word in args.lora_modules:
        name, equals, folder = word.partition("=")
        if not (name and equals and folder):
            raise ConfigError(f"--lora-modules {word}", fix="NAME=FOLDER for each adapter, after the model's folder")
        if name in found or name == served_name(args):
            raise ConfigError(f"--lora-modules names {name} twice, or as the model", fix="a name for each adapter")
        found[name] = Path(folder)
    if args.enable_lora and not found:
        raise ConfigError(
            "--enable-lora without an adapter: they are loaded when the server starts", fix="--lora-modules NAME=FOLDER"
        )
    return found


def served_name(args: argparse.Namespace) -> str:
    """The `model` that requests name to be answered without an adapter."""
    return str(args.served_model_name or args.folder.resolve().name)


def read_key(args: argparse.Namespace) -> str:
    """The key in `--api-key-file`.

    Raises:
        ConfigError: `--api-key` is given too, or the file cannot be read.
    """
    if args.api_key is not None:
        raise ConfigError("--api-key and --api-key-file", fix="drop one of the two")
    try:
        return str(args.api_key_file.read_text(encoding="utf-8")).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file cannot be read: {error}", fix="a file that holds the key alone") from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """Ignore SIGTERM and Ctrl-C in the block: a launcher sends them to all ranks, and rank 0 decides when to end."""
    before = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def serve(args: argparse.Namespace, began: Callable[[Server], None] = lambda _: None) -> None:
    """Load the model and serve until a signal; all ranks but rank 0 compute with it.

    Args:
        args: of `parse`.
        began: called on rank 0 with the server before it starts.

    Raises:
        MinimegatronError: the model cannot generate, a package is missing, or the port is taken.
    """
    try:
        from minimegatron.serving.app import Server
        from minimegatron.serving.service import ServerConfig, Service
    except ModuleNotFoundError as error:
        raise ConfigError(f"serving needs the package {error.name}", fix=EXTRA) from None
    from minimegatron.checkpoint.companions import GENERATION, stop_ids
    from minimegatron.checkpoint.conversion import open_model
    from minimegatron.checkpoint.hf_config import read_json
    from minimegatron.checkpoint.packed import memory
    from minimegatron.comm.mesh import Mesh
    from minimegatron.config import ParallelConfig
    from minimegatron.data.tokenizer import HuggingFaceTokenizer
    from minimegatron.inference import adapters as loras
    from minimegatron.inference.engine import Engine, EngineConfig
    from minimegatron.inference.grammar import Grammars
    from minimegatron.inference.loading import load
    from minimegatron.launch.rank import init
    from minimegatron.serving.protocol import Defaults

    rank, world = init()
    model_folder = open_model(args.folder, step=args.ckpt_step)
    stages, experts = args.pipeline_model_parallel_size, args.expert_model_parallel_size
    tensor = args.tensor_model_parallel_size or max(1, world // (stages * experts))
    if world != tensor * stages * experts:
        raise ConfigError(
            f"{world} ranks for tp = {tensor}, pp = {stages}, ep = {experts}",
            fix=f"--nproc-per-node {tensor * stages * experts}, and a server for each replica",
        )
    mesh = Mesh.build(
        ParallelConfig(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=stages,
            expert_model_parallel_size=experts,
            sequence_parallel=tensor > 1 and any(model_folder.config.expert_layers),
        )
    )
    tokenizer_folder = args.tokenizer_model or model_folder.tokenizer
    if tokenizer_folder is None:
        raise CheckpointError(
            "there is no tokenizer in it", where=str(args.folder), fix="--tokenizer-model FOLDER names one"
        )
    tokenizer = HuggingFaceTokenizer(tokenizer_folder, split_special_tokens=False)
    companions = model_folder.companions or tokenizer_folder
    stops = args.stop_token_ids
    if stops is None:
        stops, _ = stop_ids(companions, tokenizer.eod, model_folder.config.vocab_size)
    said: dict[str, Any] = {}
    if args.generation_config == "auto" and (companions / GENERATION).is_file():
        said = read_json(companions / GENERATION, "a folder with config.json")
    model = load(model_folder, mesh, args.params_dtype)
    adapters = loras.load_adapters(model, model_folder, args.lora_modules) if args.lora_modules else None
    if rank == 0:
        print(memory(model), file=sys.stderr)
    if rank == 0 and adapters is not None:
        print(loras.memory(model, adapters), file=sys.stderr)
    speculative, draft = speculative_of(args.speculative_config, model_folder.config)
    engine = Engine(
        model,
        EngineConfig(
            max_model_len=args.max_model_len,
            page_size=args.block_size,
            num_pages=args.num_gpu_blocks_override,
            cache_bytes=args.kv_cache_memory_bytes,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            enable_prefix_caching=args.enable_prefix_caching,
            speculative=speculative,
        ),
        draft=load_draft(draft, mesh, args.params_dtype),
        grammars=Grammars(tokenizer, model_folder.config.vocab_size),
        adapters=adapters,
    )
    if rank != 0:
        with deaf():
            engine.follow()
        return
    config = ServerConfig(
        served_model_name=served_name(args),
        api_key=args.api_key,
        max_queue=args.max_queue,
        request_seconds=args.request_timeout,
        max_body_bytes=args.max_body_bytes,
        drain_seconds=args.drain_timeout,
    )
    server = Server(Service(engine, tokenizer, stops, Defaults.of(said), config), args.host, args.port)
    began(server)
    server.run_until_signal()


def main(argv: Sequence[str] | None = None) -> None:
    """The main function of this process."""
    args = parse(argv)
    if args.data_parallel_size > 1:
        from minimegatron.commands.serve_replicas import serve_replicas

        serve_replicas(sys.argv[1:] if argv is None else argv, args)
        return
    from minimegatron.launch.rank import run_rank

    run_rank(lambda: serve(args))
