# SPDX-License-Identifier: Apache-2.0
"""Names of other libraries, and what to write in their place.

Errors about unknown arguments, attributes, metrics and losses look the name up here. A
row has the places where it may be tried, the names, and what to write. Capitals and
underscores don't matter.
"""

from __future__ import annotations

_OPTIMIZER = 'compile(ipufit.Optimizer("adam", {name}=...), ...)'

_ROWS = (
    # Arguments.
    ("fit compile", "lr learning_rate", _OPTIMIZER.format(name="learning_rate")),
    (
        "fit compile IPUModel",
        "weight_decay betas eps clipnorm clipvalue global_clipnorm "
        "loss_scaling ema_momentum",
        _OPTIMIZER,
    ),
    (
        "fit compile",
        "gradient_clip_val max_grad_norm clip_grad_norm grad_clip",
        _OPTIMIZER.format(name="global_clipnorm"),
    ),
    ("fit compile", "momentum", _OPTIMIZER.replace("adam", "sgd")),
    ("compile", "auto_scale_loss", _OPTIMIZER.format(name="loss_scaling")),
    ("compile", "criterion loss_fn loss_function objective", "loss='mse'"),
    ("compile", "optim opt", "optimizer='adam'"),
    (
        "compile fit",
        "scheduler lr_scheduler schedule lr_decay",
        'compile(lr_schedule="cosine"), or a scheduler of torch in its place',
    ),
    (
        "compile",
        "run_eagerly jit_compile",
        "nothing: a program is always compiled",
    ),
    (
        "fit",
        "train_loader train_dataloader train_dataloaders train_data train_dataset "
        "train_ds dataloader dataset loader data inputs generator",
        "fit(loader), or fit(x, y)",
    ),
    ("fit", "target targets label labels", "fit(x, y)"),
    (
        "fit",
        "val_loader val_dataloader val_dataloaders val_data val_dataset val_ds "
        "validation valid eval_set eval_data eval_dataset test_data",
        "validation_data=loader, or validation_data=(x, y)",
    ),
    ("fit", "bs", "batch_size=32"),
    ("fit", "steps limit_train_batches max_steps", "steps_per_epoch=100"),
    ("fit", "ckpt_path resume_from_checkpoint resume_from", "resume=path"),
    (
        "fit",
        "early_stopping patience early_stop",
        "callbacks=[ipufit.EarlyStopping(patience=3)]",
    ),
    ("fit", "logger log_dir", 'callbacks=[ipufit.TensorBoard("logs")]'),
    ("fit", "progress_bar show_progress enable_progress_bar", "verbose=0"),
    (
        "fit",
        "collate_fn sampler batch_sampler pin_memory",
        "fit(torch.utils.data.DataLoader(dataset, {name}=...))",
    ),
    (
        "fit compile IPUModel IPUConfig",
        "device devices accelerator",
        "nothing: programs run on IPUs, and IPUConfig says on how many",
    ),
    (
        "fit compile IPUModel",
        "workers use_multiprocessing max_queue_size",
        "IPUModel(module, ipufit.IPUConfig(num_workers=...))",
    ),
    (
        "fit compile IPUModel IPUConfig",
        "accumulate_grad_batches gradient_accumulation_steps gradientAccumulation",
        "ipufit.IPUConfig(gradient_accumulation=...)",
    ),
    ("IPUModel", "options", "ipufit.IPUConfig(customize=...), which gets the options"),
    ("IPUModel", "model net network", "IPUModel(module)"),
    ("IPUConfig", "replication_factor num_replicas data_parallel", "replicas=2"),
    (
        "IPUConfig",
        "batch_size",
        "micro_batch_size=4, of one replica; fit(batch_size=32) is that of an update",
    ),
    ("IPUConfig", "half fp16 mixed_precision amp", 'precision="float16"'),
    ("Precision Recall", "thresholds", "threshold=0.3, in a metric for each"),
    ("Precision Recall", "top_k", "metrics=['top_5_accuracy'], for one label"),
    # Attributes of a model.
    (
        "model",
        "train eval",
        "nothing: fit() trains, and evaluate() and predict() run in eval mode; "
        "model.module.{name} is the module's",
    ),
    (
        "model",
        "to cuda cpu ipu",
        "nothing: programs run on IPUs; model.module.{name} is the module's",
    ),
    ("model", "metrics_names", "list(model.evaluate(x, y))"),
    (
        "model",
        "count_params num_parameters num_params",
        "sum(p.numel() for p in model.module.parameters()), or model.summary(x)",
    ),
    (
        "model",
        "layers get_layer",
        "dict(model.module.named_modules())",
    ),
    (
        "model",
        "weights variables trainable_weights trainable_variables",
        "model.get_weights(), or model.module.parameters()",
    ),
    ("model", "save_model save_checkpoint", "model.save(path)"),
    ("model", "load_model load_checkpoint load_from_checkpoint", "model.load(path)"),
    ("model", "predict_classes", "model.predict(x).argmax(-1)"),
    ("model", "predict_proba", "model.predict(x).softmax(-1)"),
    ("model", "score test validate", "model.evaluate(x, y)"),
    ("model", "fit_generator", "model.fit(generator)"),
    ("model", "evaluate_generator", "model.evaluate(generator)"),
    ("model", "predict_generator", "model.predict(generator)"),
    ("model", "lr learning_rate", 'model.optimizer.param_groups[0]["lr"]'),
    ("model", "trainable freeze", "model.module.requires_grad_(False), before compile"),
    ("model", "copyWeightsToHost", "nothing: model.get_weights() fetches them"),
    ("model", "copyWeightsToDevice setOptimizer", "nothing: fit() does it"),
    ("model", "detachFromDevice", "model.detach()"),
    # Attributes of the package.
    (
        "ipufit",
        "Adam AdamW SGD RMSprop LAMB",
        'ipufit.Optimizer("{lower}", learning_rate=0.001)',
    ),
    ("ipufit", "Model Trainer IPUTrainer", "ipufit.IPUModel(module)"),
    ("ipufit", "Sequential Linear Dense Module", "the layers of torch.nn"),
    (
        "ipufit",
        "Options Block BeginBlock identity_loss trainingModel inferenceModel",
        "ipufit.poptorch.{name}",
    ),
    ("ipufit", "DataLoader Dataset", "torch.utils.data.{name}"),
    ("ipufit", "Accuracy AUC Precision Recall F1Score", "ipufit.metrics.{name}"),
    (
        "ipufit",
        "fit compile evaluate predict save load",
        "model.{name}(), of model = ipufit.IPUModel(module)",
    ),
    ("ipufit", "load_model", "model.load(path), of model = ipufit.IPUModel(module)"),
    (
        "ipufit",
        "set_seed seed_everything manual_seed",
        "torch.manual_seed(0) for the weights, and ipufit.IPUConfig(seed=0)",
    ),
    # Metrics and losses.
    ("metric", "roc_auc auroc roc_auc_score", "'auc', or 'exact_auc' without bins"),
    ("metric", "ap map average_precision_score", "'average_precision'"),
    ("metric", "sensitivity tpr", "'recall'"),
    ("metric", "jaccard jaccard_score", "'iou' or 'mean_iou'"),
    ("metric", "top5 top_5 acc5", "'top_5_accuracy'"),
    ("metric", "accuracy_score", "'accuracy'"),
    ("metric", "loss", "nothing: the loss is always reported"),
    (
        "metric",
        "mcc kappa cohen_kappa confusion_matrix bleu error_rate hamming",
        "a function of outputs and targets, or a metric of torchmetrics",
    ),
    (
        "loss",
        "focal focal_loss",
        "a function: def focal(x, y): ce = F.cross_entropy(x, y, reduction='none'); "
        "return (1 - torch.exp(-ce)) ** 2 * ce",
    ),
    ("loss", "l2", "'mse'"),
    ("loss", "rmse", "loss='mse', metrics=['rmse']"),
    ("loss", "cosine cosine_loss", "'cosine_similarity'"),
    ("loss", "softmax logloss log_loss categorical", "'cross_entropy'"),
    ("loss", "binary bce_logits bce_with_logits sigmoid", "'bce', which takes logits"),
    ("loss", "label_smoothing", "compile(loss='cross_entropy', label_smoothing=0.1)"),
    (
        "loss",
        "binary_focal_crossentropy dice iou jaccard tversky contrastive triplet "
        "quantile wasserstein",
        "a function loss(outputs, targets) that returns one value per sample",
    ),
)


def _key(name: str) -> str:
    return name.lower().replace("_", "")


_HINTS = {
    (place, _key(name)): way
    for places, names, way in _ROWS
    for place in places.split()
    for name in names.split()
}


def hint(place: str, name: str) -> str:
    """Return a sentence with what to write for an unknown name; empty without a row.

    Example:
        >>> hint("fit", "bs")
        'Write batch_size=32.'
        >>> hint("compile", "jit_compile")
        'Leave it out: a program is always compiled.'
    """
    way = _HINTS.get((place, _key(name)), "").format(name=name, lower=name.lower())
    if way.startswith("nothing: "):
        return f"Leave it out: {way[len('nothing: ') :]}."
    return f"Write {way}." if way else ""
