#!/bin/sh
# as in the documentation of wan_train_network.py: clips of Wan 2.1, 1.3 B
cd /opt/musubi-tuner
accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 src/musubi_tuner/wan_train_network.py \
  --task t2v-1.3B --dit models/wan2.1_t2v_1.3B_bf16.safetensors \
  --vae models/wan_2.1_vae.safetensors --t5 models/models_t5_umt5-xxl-enc-bf16.pth \
  --dataset_config musubi_wan_dataset.toml --sdpa --fp8_base --fp8_scaled --fp8_t5 \
  --optimizer_type adamw8bit --learning_rate 2e-4 --max_grad_norm 0.5 --gradient_checkpointing \
  --gradient_accumulation_steps 2 --max_data_loader_n_workers 2 --persistent_data_loader_workers \
  --network_module networks.lora_wan --network_dim 32 --network_alpha 32 --network_args "exclude_patterns=[r'.*img.*']" \
  --timestep_sampling shift --discrete_flow_shift 3.0 --min_timestep 0 --max_timestep 900 \
  --max_train_steps 1200 --save_every_n_steps 200 --save_state --seed 42 \
  --sample_prompts prompts.txt --sample_every_n_steps 200 --sample_at_first \
  --output_dir output --output_name "wan-cat" --log_with tensorboard --logging_dir logs
