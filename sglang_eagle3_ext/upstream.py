"""The only file that names private parts of SGLang.

Every private name the plugin uses stands in :data:`SEAMS` under a short alias, with the
signature it was written for, what it is used for, and the patch under ``patches/`` that would
remove the need.  Other modules write ``upstream.EagleDraftWorker``: an alias that is not in the
table does not exist, so no name can be used without a probe.

Probes read SGLang's source without importing it: they are cheap, cannot run into SGLang's import
cycles, and work before any plugin has been applied.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UpstreamMismatchError

SUPPORTED_SGLANG = ("0.5.23",)


@dataclass(frozen=True)
class Seam:
    """One private name of SGLang.

    Attributes:
        path: ``package.module:Qualified.name``.
        params: leading parameter names the plugin relies on, ``self`` included; None where the
            name is not called with arguments that could drift (classes used as types, constants).
        use: what the plugin does with it.
        drop_when: what would remove the need, usually a file under ``patches/``.
    """

    path: str
    params: tuple[str, ...] | None
    use: str
    drop_when: str = "SGLang documents it as public"


_SPEC = "sglang.srt.speculative"

SEAMS: dict[str, Seam] = {
    # --- the worker: subclassed, so that graphs, overlap and attention backends stay SGLang's -----
    "EAGLEWorkerV2": Seam(
        f"{_SPEC}.eagle_worker_v2:EAGLEWorkerV2",
        ("self", "server_args", "gpu_id", "nccl_port", "target_worker"),
        "base of the EAGLE3X worker",
    ),
    "EagleDraftWorker": Seam(
        f"{_SPEC}.eagle_worker_v2:EagleDraftWorker",
        ("self", "server_args", "gpu_id", "nccl_port", "target_worker"),
        "base of the EAGLE3X draft worker",
    ),
    "ModelConfig": Seam("sglang.srt.configs.model_config:ModelConfig", None, "the draft's configuration"),
    "ModelConfig.from_server_args": Seam(
        "sglang.srt.configs.model_config:ModelConfig.from_server_args",
        ("server_args", "is_draft_model"),
        "carries the number of taps to the draft model",
        "patches: taps and their number as one configuration",
    ),
    "EagleDraftInput": Seam(f"{_SPEC}.eagle_info:EagleDraftInput", None, "state between rounds"),
    "EagleVerifyInput": Seam(f"{_SPEC}.eagle_info:EagleVerifyInput", None, "the tree as SGLang batches it"),
    "eagle_prepare_for_verify": Seam(
        f"{_SPEC}.eagle_utils:eagle_prepare_for_verify",
        ("verify_input", "req_to_token_pool", "batch", "target_worker"),
        "slots and forward batch of the verify pass",
    ),
    "draft_tp_context": Seam(
        f"{_SPEC}.spec_utils:draft_tp_context", ("layout",), "draft passes run in the draft's TP group"
    ),
    "GenerationBatchResult": Seam(
        "sglang.srt.managers.utils:GenerationBatchResult", None, "what a round returns to the scheduler"
    ),
    "get_req_to_token_extra_context_len": Seam(
        "sglang.srt.mem_cache.kv_cache_configurator:get_req_to_token_extra_context_len",
        None,
        "hook: rows of the slot table as long as what a round allocates",
        "patches: rows of the slot table as long as what a round allocates",
    ),
    "get_alloc_reserve_per_decode": Seam(
        "sglang.srt.mem_cache.allocation_sizing:get_alloc_reserve_per_decode", (), "how much that is"
    ),
    # --- the draft's forward pass on the CPU platform -----------------------------------------------
    "ForwardBatch": Seam(
        "sglang.srt.model_executor.forward_batch_info:ForwardBatch", None, "one forward pass"
    ),
    "ForwardMode": Seam("sglang.srt.model_executor.forward_batch_info:ForwardMode", None, "its kind"),
    "ForwardContext": Seam(
        "sglang.srt.model_executor.forward_context:ForwardContext", None, "names the attention backend in use"
    ),
    "forward_context": Seam(
        "sglang.srt.model_executor.forward_context:forward_context", ("ctx",), "installs a ForwardContext"
    ),
    "get_parallel": Seam("sglang.srt.runtime_context:get_parallel", (), "tensor-parallel size"),
    "tensor_model_parallel_all_gather": Seam(
        "sglang.srt.distributed.communication_op:tensor_model_parallel_all_gather",
        ("input_",),
        "gathers the draft head's shards",
    ),
    # --- registration and start-up ------------------------------------------------------------------
    "SpeculativeAlgorithm": Seam(f"{_SPEC}.spec_info:SpeculativeAlgorithm", None, "registers EAGLE3X"),
    "SpeculativeAlgorithm.register": Seam(
        f"{_SPEC}.spec_info:SpeculativeAlgorithm.register",
        ("cls", "name", "supports_overlap", "validate_server_args", "spec_class"),
        "registers EAGLE3X",
    ),
    "CustomSpecAlgo": Seam(
        f"{_SPEC}.spec_registry:CustomSpecAlgo",
        ("self", "name", "factory", "supports_overlap", "validate_server_args"),
        "base of the EAGLE3X algorithm",
        "SGLang's conformance check covers need_topk, carries_draft_hidden_states and create_future_map",
    ),
    "get_registered_spec": Seam(f"{_SPEC}.spec_registry:get_spec", ("name",), "finds our own registration"),
    "FutureMap": Seam(
        "sglang.srt.managers.overlap_utils:FutureMap",
        ("self", "device", "spec_algo", "req_to_token_pool", "needs_cpu_seq_lens", "needs_confidence_relay"),
        "relay between overlapped rounds, as for the built-in EAGLE3",
    ),
    "HookRegistry": Seam("sglang.srt.plugins.hook_registry:HookRegistry", None, "applies our hooks"),
    "HookRegistry.register": Seam(
        "sglang.srt.plugins.hook_registry:HookRegistry.register",
        ("cls", "target", "hook", "hook_type"),
        "applies our hooks",
    ),
    "HookRegistry._patched": Seam(
        "sglang.srt.plugins.hook_registry:HookRegistry._patched",
        None,
        "tells whether a hook was applied: a failure is only logged",
        "SGLang raises where a hook cannot be applied",
    ),
    "HookType": Seam("sglang.srt.plugins.hook_registry:HookType", None, "kinds of hooks"),
    "ServerArgs": Seam("sglang.srt.server_args:ServerArgs", None, "defaults, to tell what the user set"),
    "ServerArgs.add_cli_args": Seam(
        "sglang.srt.server_args:ServerArgs.add_cli_args",
        ("parser",),
        "hook: the --eagle3x-* flags",
        "SGLang offers plugins a way to add flags",
    ),
    "ServerArgs.from_cli_args": Seam(
        "sglang.srt.server_args:ServerArgs.from_cli_args",
        ("cls", "args"),
        "hook: keeps the flags with their ServerArgs",
        "SGLang offers plugins a way to add flags",
    ),
    "ServerArgs.resolve_once": Seam(
        "sglang.srt.server_args:ServerArgs.resolve_once",
        ("self",),
        "hook: compares what was asked for with what was resolved",
        "SGLang refuses instead of changing what the user set",
    ),
    "run_resolution_pipeline": Seam(
        "sglang.srt.arg_groups.pipeline:run_resolution_pipeline",
        ("server_args",),
        "keeps the user's values in _raw_input and SGLang's changes in _resolved_overrides",
        "SGLang refuses instead of changing what the user set",
    ),
    "resolving_view": Seam(
        "sglang.srt.arg_groups.overrides:resolving_view", None, "ServerArgs as resolved so far"
    ),
    "record_fields": Seam(
        "sglang.srt.arg_groups.arg_utils:record_fields", ("cls",), "the fields with their defaults"
    ),
    "_print_llm_help": Seam(
        "sglang.cli.serve:_print_llm_help",
        ("_request",),
        "loads the plugins before the help is printed",
        "SGLang loads its plugins before the help of sglang serve, as for every other command",
    ),
    "load_plugins": Seam("sglang.srt.plugins:load_plugins", (), "loads the plugins before that help"),
    "get_spec": Seam(
        "sglang.srt.runtime_context:get_spec", (), "which algorithm the process that takes requests serves"
    ),
    "TokenizerManager._create_tokenized_object": Seam(
        "sglang.srt.managers.tokenizer_manager:TokenizerManager._create_tokenized_object",
        ("self", "obj"),
        "hook: refuses requests that could not be honoured",
        "SGLang asks the algorithm about a request",
    ),
    "current_platform": Seam(
        "sglang.srt.platforms:current_platform", None, "eagle3x env: the platform chosen"
    ),
    # --- the CPU platform ---------------------------------------------------------------------------
    "SRTPlatform": Seam("sglang.srt.platforms.interface:SRTPlatform", None, "base of the CPU platform"),
    "PlatformEnum": Seam("sglang.srt.platforms.device_mixin:PlatformEnum", None, "marks it out of tree"),
    "AttentionBackend": Seam(
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend", None, "base of the CPU attention"
    ),
    "register_attention_backend": Seam(
        "sglang.srt.layers.attention.attention_registry:register_attention_backend",
        ("name",),
        "makes it selectable",
    ),
    "add_attention_backend_choices": Seam(
        "sglang.srt.arg_groups.choices:add_attention_backend_choices",
        None,
        "lets --attention-backend name it",
    ),
    "RadixAttention": Seam(
        "sglang.srt.layers.radix_attention:RadixAttention",
        None,
        "finds layers that the CPU attention cannot serve",
    ),
    "assign_req_to_token_pool_func": Seam(
        "sglang.srt.mem_cache.allocation:assign_req_to_token_pool_func",
        ("req_pool_indices", "req_to_token", "start_offset", "end_offset", "out_cache_loc", "batch_size"),
        "replaced on the CPU platform: a Triton launch with no platform seam",
        "patches: a platform seam for slot assignment",
    ),
    "get_last_loc": Seam(
        "sglang.srt.mem_cache.allocation:get_last_loc",
        ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
        "replaced on the CPU platform: a Triton launch with no platform seam",
        "patches: a platform seam for slot assignment",
    ),
    "MHATokenToKVPool._init_kv_copy_and_warmup": Seam(
        "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool._init_kv_copy_and_warmup",
        ("self",),
        "replaced on the CPU platform: a Triton launch with no platform seam",
        "patches: a platform seam for moving KV rows",
    ),
    "AttentionBackendRegistry.register": Seam(
        "sglang.srt.models.deepseek_common.attention_backend_handler:AttentionBackendRegistry.register",
        ("cls", "backend_name", "handler_func"),
        "DeepSeek-style targets: every pass reads the latent cache",
    ),
    "AttnForwardMethod": Seam(
        "sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods:AttnForwardMethod",
        None,
        "names that way of attention",
    ),
    "KVWriteLoc": Seam("sglang.srt.mem_cache.memory_pool:KVWriteLoc", None, "where new keys and values go"),
}


def installed_version() -> str:
    """Version of the installed SGLang.

    Raises:
        UpstreamMismatchError: SGLang is not installed.
    """
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise UpstreamMismatchError(
            "sglang is not installed\n    hint: pip install sglang==" + SUPPORTED_SGLANG[-1]
        ) from None


@functools.cache
def _module_tree(module: str) -> ast.Module | None:
    """Parsed source of ``module``; None where it does not exist."""
    parts = module.split(".")
    root = importlib.util.find_spec(parts[0])
    if root is None or not root.submodule_search_locations:
        return None
    # find_spec on the full name would import every parent package.
    base = Path(next(iter(root.submodule_search_locations))).joinpath(*parts[1:])
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.is_file():
            return ast.parse(candidate.read_text(encoding="utf-8"))
    return None


def _bound_names(node: ast.stmt) -> set[str]:
    """Names that a module- or class-level statement binds."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {t.id for target in node.targets for t in ast.walk(target) if isinstance(t, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return set()


def _find(body: list[ast.stmt], name: str) -> ast.stmt | None:
    for node in body:
        if name in _bound_names(node):
            return node
        if isinstance(node, ast.If | ast.Try):
            inner = [*node.body, *node.orelse, *(node.finalbody if isinstance(node, ast.Try) else [])]
            if (found := _find(inner, name)) is not None:
                return found
    return None


def _parameters(node: ast.stmt) -> tuple[str, ...] | None:
    if isinstance(node, ast.ClassDef):
        init = _find(node.body, "__init__")
        return _parameters(init) if init is not None else None
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return tuple(a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
    return None


def probe(seam: Seam) -> str | None:
    """None where the installed SGLang has ``seam`` as expected, else what is wrong with it."""
    module, _, qualname = seam.path.partition(":")
    tree = _module_tree(module)
    if tree is None:
        return f"module {module} does not exist"
    body: list[ast.stmt] = tree.body
    node: ast.stmt | None = None
    for part in qualname.split("."):
        node = _find(body, part)
        if node is None:
            return f"{seam.path} does not exist"
        body = node.body if isinstance(node, ast.ClassDef) else []
    if seam.params is None:
        return None
    assert node is not None
    found = _parameters(node)
    missing = [p for p in seam.params if found is None or p not in found]
    if missing:
        return f"{seam.path} takes {found}, expected {', '.join(missing)}"
    return None


def check() -> None:
    """Refuse an SGLang this plugin was not written for.

    Raises:
        UpstreamMismatchError: wrong version, or a seam that is missing or has another signature;
            every failing seam is listed.
    """
    version = installed_version()
    base = version.partition("+")[0]
    failures = [f"{alias}: {fault}" for alias, seam in SEAMS.items() if (fault := probe(seam))]
    if base in SUPPORTED_SGLANG and not failures:
        return
    lines = [f"sglang {version} is installed, EAGLE3X supports {', '.join(SUPPORTED_SGLANG)}"]
    lines += [f"    seam {failure}" for failure in failures]
    lines.append(
        f"    hint: pip install sglang=={SUPPORTED_SGLANG[-1]}"
        if base not in SUPPORTED_SGLANG
        else f"    hint: this copy of sglang {version} was modified; reinstall it with "
        f"pip install --force-reinstall --no-deps sglang=={base}"
    )
    raise UpstreamMismatchError("\n".join(lines))


def __getattr__(name: str) -> Any:
    """Resolve an alias of :data:`SEAMS`, importing SGLang only now."""
    seam = SEAMS.get(name)
    if seam is None:
        raise AttributeError(f"{name!r} is not a seam of SGLang; add it to SEAMS with its signature")
    module, _, qualname = seam.path.partition(":")
    value: Any = importlib.import_module(module)
    for part in qualname.split("."):
        value = getattr(value, part)
    return value


def hook_target(alias: str) -> str:
    """Dotted path of a seam, as SGLang's hook registry wants it."""
    return SEAMS[alias].path.replace(":", ".")


@contextlib.contextmanager
def draft_worker_class(factory: Any) -> Iterator[None]:
    """While SGLang's V2 worker builds itself, let it build our draft worker instead of its own."""
    module = importlib.import_module(SEAMS["EagleDraftWorker"].path.partition(":")[0])
    original = module.EagleDraftWorker
    module.EagleDraftWorker = factory  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.EagleDraftWorker = original  # type: ignore[attr-defined]


@contextlib.contextmanager
def draft_taps(count: int, aux: bool) -> Iterator[None]:
    """While the draft model is built, tell it how many taps it was trained on.

    SGLang's draft classes read the number from ``eagle_config`` or assume three; a manifest or a flag
    may say otherwise.

    Args:
        aux: whether captured planes feed the draft, or the target's normed state.
    """
    model_config = importlib.import_module(SEAMS["ModelConfig"].path.partition(":")[0]).ModelConfig
    original = model_config.__dict__["from_server_args"]

    def from_server_args(*arguments: Any, **named: Any) -> Any:
        config = original.__func__(*arguments, **named)
        if named.get("is_draft_model"):
            hf = config.hf_config
            hf.num_aux_hidden_states = count
            hf.eagle_config = {
                **(getattr(hf, "eagle_config", None) or {}),
                "use_aux_hidden_state": aux,
                # Only the length is read, by the MLA draft; the capture is set elsewhere.
                "eagle_aux_hidden_state_layer_ids": list(range(count)),
            }
        return config

    model_config.from_server_args = staticmethod(from_server_args)
    try:
        yield
    finally:
        model_config.from_server_args = original


def raw_input(server_args: Any) -> dict[str, Any]:
    """What the user set, before any resolution: field name to value; defaults are included."""
    return dict(getattr(server_args, "_raw_input", None) or {})


def is_resolved(server_args: Any) -> bool:
    """Whether SGLang has resolved this ServerArgs already, here or in the process it came from."""
    return bool(getattr(server_args, "_resolution_finished", False))


def unresolve(server_args: Any) -> None:
    """Mark a resolution as failed, so that no later call takes its result for a good one."""
    server_args._resolution_finished = False
    server_args._resolution_failed = True


def resolution(server_args: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[Any]]:
    """What became of a resolved ServerArgs: (given, defaults, resolved, declared).

    ``declared`` is SGLang's list of (step, {field: value}) in the order of its decisions.
    """
    given = raw_input(server_args)
    view = __getattr__("resolving_view")(server_args)
    fields = __getattr__("record_fields")(type(server_args))
    defaults = {field.name: field.default for field in fields}
    resolved = {name: getattr(view, name) for name in given}
    return given, defaults, resolved, list(getattr(server_args, "_resolved_overrides", None) or ())


def hook_applied(alias: str) -> bool:
    """Whether SGLang has wrapped the target of our hook on ``alias``."""
    return hook_target(alias) in __getattr__("HookRegistry")._patched
