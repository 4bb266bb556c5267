
dataset_name="{dataset}"
train_files="['./data/${{dataset_name}}/train.parquet']"
CUDA_VISIBLE_DEVICES=0,1 python3 -m verl.trainer.{program} \
    algorithm.adv_estimator=grpo \
    data.train_files="$train_files" \
    data.train_batch_size=64 \
    actor_rollout_ref.model.path=Qwen/Qwen3-0.6B \
    actor_rollout_ref.actor.ppo_mini_batch_size=$((16)) \
    actor_rollout_ref.actor.use_kl_loss=False \
    trainer.project_name='{project}' \
    trainer.experiment_name="${{dataset_name}}_grpo_warmup" \
    trainer.default_local_dir="/out/"'${{trainer.project_name}}/${{trainer.experiment_name}}'
