
nproc=2
torchrun --nproc_per_node=$nproc -m verl.trainer.fsdp_sft_trainer \
  data.train_files=a.parquet data.val_files=b.parquet data.train_batch_size=64 \
  data.prompt_key=extra_info data.response_key=extra_info \
  +data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] \
  data.micro_batch_size_per_gpu=4 model.partial_pretrain=org/m optim.lr=1e-4 \
  optim.betas=[0.9,0.95] optim.lr_scheduler=cosine trainer.total_epochs=3 \
  trainer.total_training_steps=null trainer.logger=console data.strange=1 $@
