"""`postgrad generate MODEL data=SET[,SET...] out=FILE key=value ...`"""

from postgrad.errors import NoEffect


def generate(model: str, *overrides: str) -> int:
    """Write a model's responses to problems to a data file, without scoring them. The same command
    continues after it was stopped. postgrad score FILE scores the file.

    Args:
        model: as of postgrad eval
        overrides: settings, see below

    settings:
      data=SET[,SET ...]  problem files in any format that training reads
      out=FILE            FILE.parquet or FILE.jsonl: one row per problem, the problem in verl's
                          schema, and the columns responses, finishes and lengths, each a list
      n=16 temperature=0.6 top_p=0.95 max_response_tokens=2048 limit=40 engine=vllm seed=1
                          the keys of postgrad eval; without n, decoding is greedy
    """
    from postgrad.evaluation.generate import generate_file, make_generate_plan
    from postgrad.evaluation.model import find_model
    from postgrad.evaluation.progress import Progress
    from postgrad.evaluation.settings import full_key, read_settings

    for override in overrides:
        if full_key(override.partition("=")[0]).startswith("reward."):
            raise NoEffect(f"{override} has no effect: postgrad generate scores nothing")
    target = find_model(model)
    settings = read_settings(target.path, list(overrides), target.config, "generate")
    plan = make_generate_plan(settings, target)
    num_responses = generate_file(plan, Progress())
    print(f"{num_responses} responses: {settings.out}")
    return 0
