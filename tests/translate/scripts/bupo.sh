
#!/usr/bin/env bash
project_name='BuPO'
max_response_length=$((1024 * {kilotokens}))
WORKING_DIR=${{WORKING_DIR:-"${{PWD}}"}}
MODEL_PATH=${{MODEL_PATH:-"your/model/path"}}
DATA_PATH=${{DATA_PATH:-"your/data/path"}}
TRAIN_FILE=${{TRAIN_FILE:-"${{DATA_PATH}}/deepmath-5k.parquet"}}
TEST_FILE=${{TEST_FILE:-["${{DATA_PATH}}/aime_2024.parquet","${{DATA_PATH}}/math500.parquet"]}}
sp_size=1
k={layer}
experiment_name="modelname_bupo_${{k}}layerpolicy"
python3 -m verl.trainer.main_ppo \
    data.train_files="${{TRAIN_FILE}}" \
    data.val_files="${{TEST_FILE}}" \
    data.truncation='left' \
    data.max_response_length=${{max_response_length}} \
    data.train_batch_size=128 \
    {own} algorithm.adv_estimator=grpo \
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.model.path="${{MODEL_PATH}}" \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=${{sp_size}} \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    trainer.project_name="${{project_name}}" \
    trainer.n_gpus_per_node=8 \
    trainer.default_local_dir=${{PWD}}/checkpoints/${{project_name}}/${{experiment_name}} \
    trainer.experiment_name=${{experiment_name}} $@
