"""Fit a device's tree to the records of a sweep, and write it as plans read it."""

import json
from collections.abc import Sequence
from typing import Any

from quire.dispatch.device import DeviceProperties
from quire.dispatch.tree import walk
from quire.dispatch.tree_file import GENERIC, load_tree
from quire_tools.tuning.configs import HOPPER, LATENT_SECTION, SECTION, default_config, features, key_of, section_of
from quire_tools.tuning.fit import Measured, Tree, covers_of, fit_tree, limit_to_measured, regrets, replace_leaves
from quire_tools.tuning.jobs import Job
from quire_tools.tuning.records import Records

PORTABLE = "portable"
KERNEL_LEVELS = 3  # of the tree that chooses between the Hopper kernel and the portable ones
FALLBACK_WEIGHT = 0.1  # of a case where the portable configuration only serves as the Hopper kernel's fallback
TREES = SECTION, LATENT_SECTION, "hopper"
FACTS = "device", "torch", "triton", "commit", "date", "quick"  # of the header, which a tree keeps


def train(chosen: Sequence[Job], records: Records, properties: DeviceProperties) -> dict[str, Any]:
    """Return the tree that fits the records, with its provenance, as plans read it.

    Raises:
        ValueError: the records have no times to fit to.
    """
    measured = [job for job in chosen if records.last(job.case.name).keys() - {HOPPER}]
    fitted_to = [job for job in measured if not job.held_out]
    of_latents = [job for job in fitted_to if section_of(job.case) == LATENT_SECTION]
    of_keys = [job for job in fitted_to if section_of(job.case) == SECTION]
    kernel_cases = kernel_rows(of_keys, records, properties)
    kernels: Tree = fit_tree(kernel_cases, KERNEL_LEVELS) if kernel_cases else GENERIC
    config_cases = config_rows(of_keys, records, properties, kernels)
    configs = limit_to_measured(fit_tree(config_cases), config_cases)
    if kernel_cases:  # again, against the configurations that were chosen and not against the best ones
        kernel_cases = kernel_rows(of_keys, records, properties, configs)
        kernels = limit_to_measured(fit_tree(kernel_cases, KERNEL_LEVELS), kernel_cases, KERNEL_LEVELS)
    facts = {key: records.header[key] for key in FACTS if key in records.header}
    facts |= {"cases": len(fitted_to), "held_out": len(measured) - len(fitted_to)}
    latent_cases = config_rows(of_latents, records, properties)
    sections = {SECTION: configs}
    if latent_cases:
        sections[LATENT_SECTION] = limit_to_measured(fit_tree(latent_cases), latent_cases)
    return {
        "fitted_on": facts | {"configs_alone": regrets(config_cases, configs)},
        "properties": records.header["properties"],
        "covers": covers_of([*config_cases, *latent_cases]),
        **{name: replace_leaves(tree, records.leaves | {GENERIC: GENERIC}) for name, tree in sections.items()},
        "hopper": replace_leaves(kernels, {HOPPER: True, PORTABLE: False, GENERIC: GENERIC}),
    }


def config_rows(
    chosen: Sequence[Job], records: Records, properties: DeviceProperties, kernels: Tree = GENERIC
) -> list[Measured]:
    """Return the times of portable configurations, as `fit_tree` takes them.

    Where `kernels`, a tree of kernels, chooses the Hopper kernel, a portable configuration serves only caches that TMA
    cannot address, so its regret counts less.
    """
    rows = []
    for job in chosen:
        times = records.last(job.case.name)
        has_hopper = times.pop(HOPPER, None) is not None
        seen, generic = features(job.case, properties), key_of(default_config(job.case, properties).leaf)
        if generic in times:
            times[GENERIC] = times[generic]
        is_fallback = has_hopper and kernel_of(kernels, seen) == HOPPER
        rows.append(Measured(seen, times, FALLBACK_WEIGHT if is_fallback else 1.0))
    return rows


def kernel_rows(
    chosen: Sequence[Job], records: Records, properties: DeviceProperties, configs: Tree | None = None
) -> list[Measured]:
    """Return the times of the Hopper kernel and of portable configurations, as `fit_tree` takes them.

    The portable configuration is the one that `configs`, a tree of configurations, chooses, or the best without a tree.
    """
    rows = []
    for job, row in zip(chosen, config_rows(chosen, records, properties), strict=True):
        hopper = records.last(job.case.name).get(HOPPER)
        if hopper is None:
            continue
        portable = min(row.times.values())
        if configs is not None:
            portable = row.times.get(walk(configs, row.features), portable)
        times = {PORTABLE: portable, HOPPER: hopper}
        rows.append(Measured(row.features, times | {GENERIC: times[kernel_of(GENERIC, row.features)]}))
    return rows


def kernel_of(kernels: Tree, seen: dict[str, float]) -> str:
    """Return the kernel that a tree of kernels chooses, or the generic tree where the leaf leaves it to that."""
    leaf = walk(kernels, seen)
    if leaf != GENERIC:
        return leaf
    return HOPPER if walk(load_tree(GENERIC)["hopper"], seen) else PORTABLE


def as_json(tree: dict[str, Any]) -> str:
    """Return a tree as JSON with a line for each part and each node."""

    def node(part: Any, indent: str) -> str:
        if not isinstance(part, list):
            return json.dumps(part)
        inner = indent + "  "
        return f"[{json.dumps(part[0])}, {part[1]},\n{inner}{node(part[2], inner)},\n{inner}{node(part[3], inner)}]"

    lines = [f'  "{name}": {node(part, "  ") if name in TREES else json.dumps(part)}' for name, part in tree.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"
