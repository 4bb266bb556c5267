"""`postgrad analyze entropy MODEL data=... key=value ...`"""

from typing import Literal

from postgrad.errors import Missing


def analyze(analysis: Literal["entropy"], model: str, *overrides: str) -> int:
    """Measure the entropy of a model's internal policies: after every block, and of what attention
    and FFN add to the residual stream. Reports the boundary layer, the last layer whose FFN raises
    the entropy. BuPO trains that layer's policy first (method.num_blocks).

    Args:
        analysis [entropy]: what is measured
        model: run folder (its newest checkpoint), checkpoint, model folder, GGUF file, hub id,
            smollm2 or tiny
        overrides: settings, see below

    data= is a run folder (its rollouts), a parquet file of rollouts, or a folder or .jsonl file of
    postgrad eval, which answers problems.

    settings and their defaults:
      rows=64 step=0 tolerance=0.05 token_budget=4096 dtype=float32 device=auto out=FOLDER

    Writes entropy.json and five figures (PNG and PDF) to RUN/eval/entropy or entropy-MODEL.
    """
    if "=" in model:
        raise Missing(
            "the model is missing; write postgrad analyze entropy MODEL data=...", at="MODEL"
        )
    from postgrad.analysis.entropy import internal_depth
    from postgrad.analysis.run import analyze_entropy
    from postgrad.analysis.settings import read_settings
    from postgrad.evaluation.model import find_model

    target = find_model(model)
    config = read_settings(target.path, list(overrides))
    report, folder, figures = analyze_entropy(config, target)
    entropy = report["full_policy"]["mean"]
    print(
        f"{report['tokens']} tokens of {report['rows']} responses; "
        f"mean entropy of the full policy: {entropy:.3f} nats"
    )
    layer = report["boundary_layer"]
    if layer is None:
        print(
            "no boundary layer: no FFN raises the entropy by more than "
            f"{report['boundary_threshold']:.3g} nats (tolerance={config.tolerance:g})"
        )
    else:
        depth = internal_depth(layer, report["num_layers"])
        print(
            f"boundary layer: {layer} of {report['num_layers']}; postgrad train bupo "
            f"model.path={model} method.num_blocks={depth} ..."
        )
    pictures = [file.name for file in figures if file.suffix == ".png"]
    print(f"results: {folder}/entropy.json and {', '.join(pictures)} (also as PDF)")
    return 0
