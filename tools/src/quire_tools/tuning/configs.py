"""The configurations of a case: which are legal, how records and trees name them, and what a plan is asked for."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from quire.dispatch.config import HINTS, KernelConfig, reduced
from quire.dispatch.device import DeviceProperties
from quire.dispatch.request import Bounds, Options, Request
from quire.dispatch.tree import decision, features_of, hopper_config, padded, rounded
from quire.dispatch.tree_file import GENERIC, load_tree
from quire.kernels.launch import Launch
from quire.plan import decide
from quire_tools.bench.case import Case
from quire_tools.tuning.space import legal_configs

if TYPE_CHECKING:  # it needs Triton, as the help of a command does not
    from quire.targets import Launch as LaunchToCompile

HOPPER = "hopper"  # stands for the Hopper kernel, which has one configuration per spec
SECTION, LATENT_SECTION = "attention", "mla"  # of a tree
Config = KernelConfig | str


def features(case: Case, properties: DeviceProperties) -> dict[str, float]:
    """Return the features of a case that a tree may ask for."""
    return features_of(case.spec, properties, *rounded(case.spec, properties, **case.bounds))


def section_of(case: Case) -> str:
    """Return which section of a tree chooses the configuration of a case."""
    return LATENT_SECTION if case.spec.latent else SECTION


def default_config(case: Case, properties: DeviceProperties) -> KernelConfig:
    """Return the generic tree's choice."""
    return chosen_config(load_tree(GENERIC), case, properties)


def chosen_config(tree: dict[str, Any], case: Case, properties: DeviceProperties) -> KernelConfig:
    """Return the configuration that a tree chooses for a case; the generic tree's if it has none for such cases."""
    section = section_of(case)
    leaf = decision(tree.get(section, GENERIC), features(case, properties), section)
    return config_of(leaf, case, properties)


def config_of(leaf: dict[str, Any], case: Case, properties: DeviceProperties) -> KernelConfig:
    """Return the configuration that a tree's leaf means for a case."""
    spec = case.spec
    return reduced(
        KernelConfig(**leaf, block_d=padded(spec.head_dim), block_dv=padded(spec.head_dim_v)), spec, properties
    )


def serves_hopper(case: Case, properties: DeviceProperties) -> bool:
    """Whether the Hopper kernel serves a case."""
    served = not isinstance(hopper_config(case.spec, properties, short=False, queries=128, ragged=False), str)
    return served and case.bounds["max_query_len"] > 1


def configs_of(case: Case, properties: DeviceProperties, quick: bool) -> list[Config]:
    """Return the legal configurations of a case: the default, then the space, then the Hopper kernel if it serves."""
    space = legal_configs(case.spec, properties, int(features(case, properties)["rows_per_seq"]), quick)
    found: list[Config] = list(dict.fromkeys([default_config(case, properties), *space]))
    return [*found, HOPPER] if serves_hopper(case, properties) else found


def leaf_of(config: Config) -> dict[str, Any] | str:
    """Return a configuration as records and trees hold it."""
    return config if isinstance(config, str) else config.leaf


def key_of(leaf: dict[str, Any] | str) -> str:
    """Return a short name of a leaf, for instance "16x64 w4 s3u p2".

    It has rows × keys, warps, stages, "u" for a full-tile loop, programs per SM, and AMD's hints.
    """
    if isinstance(leaf, str):
        return leaf
    unmasked = "u" if leaf["full_tile_loop"] else ""
    hints = "".join(f" {hint} {leaf[hint]}" for hint in HINTS if leaf.get(hint))
    size = f"{leaf['block_m']}x{leaf['block_n']} w{leaf['num_warps']} s{leaf['num_stages']}"
    return f"{size}{unmasked} p{leaf['programs_per_sm']}{hints}"


def options_of(config: Config) -> dict[str, Any]:
    """Return the options of `quire.plan` that ask for a configuration."""
    return {"kernel": HOPPER} if isinstance(config, str) else {"config": config}


def launch_of(case: Case, properties: DeviceProperties, config: Config | None = None) -> Launch:
    """Return the launch that is decided for a case on a device, which need not be here."""
    bounds = Bounds(**case.bounds)
    request = Request(case.spec, len(case.lens), bounds.max_query_len > 1, bounds, properties)
    launch, _ = decide(request, Options() if config is None else Options(**options_of(config)))
    return launch


def launches(
    wanted: Iterable[tuple[Case, Sequence[Config]]], properties: DeviceProperties
) -> "dict[LaunchToCompile, list[tuple[str, str]]]":
    """Return the launches that differ in what is compiled, each with the (case, configuration) names it stands for."""
    from quire.targets import Launch as LaunchToCompile

    found: dict[Hashable, LaunchToCompile] = {}
    stands_for: dict[LaunchToCompile, list[tuple[str, str]]] = defaultdict(list)
    for case, configs in wanted:
        for config in configs:
            key = case.spec, case.page_size, launch_of(case, properties, config).compile_keys()
            if key not in found:
                options = tuple(options_of(config).items())
                found[key] = LaunchToCompile(
                    case.spec, len(case.lens), **case.bounds, page_size=case.page_size, options=options
                )
            stands_for[found[key]].append((case.name, key_of(leaf_of(config))))
    return stands_for
