#!/bin/sh
export DIT=/models/z_image_bf16.safetensors
accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 src/musubi_tuner/zimage_train_network.py \
  --dit $DIT --vae /models/ae.safetensors --text_encoder /models/qwen_3_4b.safetensors \
  --dataset_config musubi_dataset.toml --flash_attn --split_attn \
  --fp8_base --fp8_scaled --fp8_llm --blocks_to_swap 12 --compile --compile_mode default \
  --timestep_sampling shift --weighting_scheme none --discrete_flow_shift 2.0 \
  --optimizer_type adamw8bit --optimizer_args weight_decay=0.02 --learning_rate 1e-4 --lr_scheduler cosine --lr_warmup_steps 10 \
  --gradient_checkpointing --max_data_loader_n_workers 2 --persistent_data_loader_workers \
  --network_module networks.lora_zimage --network_dim 16 --network_alpha 16 --network_dropout 0.05 \
  --max_train_epochs 16 --save_every_n_epochs 4 --seed 42 --save_precision bf16 \
  --metadata_title "zibo" --metadata_author "me" --output_dir output --output_name zimage-zibo
