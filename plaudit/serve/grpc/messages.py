"""Protobuf messages of KServe's v2 protocol and Triton's extensions to it, limited to the fields the server uses.

They are declared here by name and number in a separate descriptor pool: no generated code is needed, and they do not
conflict with Triton's own declarations in the same program.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"
_NAMED = "name:string=1 version:string=2"
_TENSOR = "name:string=1 datatype:string=2 shape:int64*=3 parameters:{InferParameter}=4 contents:InferTensorContents=5"
_READY = "ready:bool=1"
# field:type=number; * repeated, {} a map from strings, | one of a set
SCHEMA = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live:bool=1",
    "ServerReadyRequest": "",
    "ServerReadyResponse": _READY,
    "ModelReadyRequest": _NAMED,
    "ModelReadyResponse": _READY,
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "name:string=1 version:string=2 extensions:string*=3",
    "ModelMetadataRequest": _NAMED,
    "TensorMetadata": "name:string=1 datatype:string=2 shape:int64*=3",
    "ModelMetadataResponse": "name:string=1 versions:string*=2 platform:string=3 inputs:TensorMetadata*=4 "
    "outputs:TensorMetadata*=5",
    "InferParameter": "bool_param:bool|=1 int64_param:int64|=2 string_param:string|=3 double_param:double|=4 "
    "uint64_param:uint64|=5",
    "InferTensorContents": "bool_contents:bool*=1 int_contents:int32*=2 int64_contents:int64*=3 "
    "uint_contents:uint32*=4 uint64_contents:uint64*=5 fp32_contents:float*=6 fp64_contents:double*=7 "
    "bytes_contents:bytes*=8",
    "InferInputTensor": _TENSOR,
    "InferRequestedOutputTensor": "name:string=1 parameters:{InferParameter}=2",
    "ModelInferRequest": "model_name:string=1 model_version:string=2 id:string=3 parameters:{InferParameter}=4 "
    "inputs:InferInputTensor*=5 outputs:InferRequestedOutputTensor*=6 raw_input_contents:bytes*=7",
    "InferOutputTensor": _TENSOR,
    "ModelInferResponse": "model_name:string=1 model_version:string=2 id:string=3 parameters:{InferParameter}=4 "
    "outputs:InferOutputTensor*=5 raw_output_contents:bytes*=6",
    "ModelConfigRequest": _NAMED,
    "ModelInput": "name:string=1 data_type:int32=2 dims:int64*=4 optional:bool=8",
    "ModelOutput": "name:string=1 data_type:int32=2 dims:int64*=3",
    "ModelDynamicBatching": "preferred_batch_size:int32*=1 max_queue_delay_microseconds:uint64=2",
    "ModelTransactionPolicy": "decoupled:bool=1",
    "ModelConfig": "name:string=1 platform:string=2 max_batch_size:int32=4 input:ModelInput*=5 output:ModelOutput*=6 "
    "dynamic_batching:ModelDynamicBatching=11 backend:string=17 model_transaction_policy:ModelTransactionPolicy=19",
    "ModelConfigResponse": "config:ModelConfig=1",
    "ModelStatisticsRequest": _NAMED,
    "StatisticDuration": "count:uint64=1 ns:uint64=2",
    "InferStatistics": " ".join(
        f"{name}:StatisticDuration={number}"
        for number, name in enumerate(
            ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"),
            1,
        )
    ),
    "ModelStatistics": "name:string=1 version:string=2 last_inference:uint64=3 inference_count:uint64=4 "
    "execution_count:uint64=5 inference_stats:InferStatistics=6",
    "ModelStatisticsResponse": "model_stats:ModelStatistics*=1",
    "RepositoryIndexRequest": "repository_name:string=1 ready:bool=2",
    "ModelIndex": "name:string=1 version:string=2 state:string=3 reason:string=4",
    "RepositoryIndexResponse": "models:ModelIndex*=1",
}
# ModelInput and ModelOutput declare it as an enum, which is an int32 on the wire.
DATA_TYPES = {
    f"TYPE_{name}": number
    for number, name in enumerate(
        ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64",
         "STRING", "BF16"), 1,
    )
}  # fmt: skip
_FIELD = descriptor_pb2.FieldDescriptorProto


def _declared() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="plaudit/kserve_v2.proto", package=PACKAGE, syntax="proto3")
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        for field in fields.split():
            _add(message, *_split(field))
    return file


def _split(field: str) -> tuple[str, str, int]:
    name, _, rest = field.partition(":")
    kind, _, number = rest.partition("=")
    return name, kind, int(number)


def _add(message: Any, name: str, kind: str, number: int) -> None:
    if kind.startswith("{"):  # a map is a repeated message with key and value
        entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        _add(entry, "key", "string", 1)
        _add(entry, "value", kind.strip("{}"), 2)
        kind = f"{message.name}.{entry.name}*"
    plain = kind.rstrip("*|")
    field = message.field.add(name=name, number=number, label=_FIELD.LABEL_OPTIONAL)
    if kind.endswith("*"):
        field.label = _FIELD.LABEL_REPEATED
    if kind.endswith("|"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    if plain[0].isupper():
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{PACKAGE}.{plain}"
    else:
        field.type = getattr(_FIELD, f"TYPE_{plain.upper()}")


def _classes() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_declared())
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in SCHEMA}


MESSAGES: dict[str, Any] = _classes()
