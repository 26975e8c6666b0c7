"""`--to sagemaker`: the script, and the request that the SDK makes of it."""

import ast
import runpy
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fivefold.core.errors import UserError
from fivefold.jobs.engines import engine
from fivefold.jobs.job import Job

ROLE = "arn:aws:iam::123456789012:role/service-role/trains"
BUCKET = "sagemaker-eu-west-1-123456789012"
IMAGE = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/fivefold:1"


def script(**changes: Any) -> str:
    job = Job(run=Path("notes.yaml"), text="", name="Notes 1", runs="runs", image=IMAGE, **changes)
    return engine("sagemaker").text(job)


def keywords(text: str, function: str) -> list[dict[str, ast.expr]]:
    """The keyword arguments of every call of `function`."""
    return [
        {keyword.arg or "": keyword.value for keyword in node.keywords}
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function
    ]


def test_the_script_says_what_runs_where() -> None:
    text = script(devices=8, minutes=90, overrides=('data.train=it\'s "x"\n', "layout=tp8"))
    (code,), (compute,) = keywords(text, "SourceCode"), keywords(text, "Compute")
    assert ast.literal_eval(code["command"]) == "exec fivefold"
    assert ast.literal_eval(code["args"]) == [
        *("train", "notes.yaml", 'data.train=it\'s "x"\n', "layout=tp8", "run.dir=/opt/ml/checkpoints")
    ]
    assert ast.literal_eval(compute["instance_type"]) == "ml.p5.48xlarge"
    (stopping,) = keywords(text, "StoppingCondition")
    assert ast.literal_eval(stopping["max_runtime_in_seconds"]) == 90 * 60
    assert keywords(text, "CheckpointConfig") and not keywords(text, "Networking")


def test_several_hosts_share_a_file_system_and_efa() -> None:
    text = script(devices=8, nodes=2)
    (code,), (trainer,) = keywords(text, "SourceCode"), keywords(text, "ModelTrainer")
    assert "run.dir=/opt/ml/input/data/shared" in ast.literal_eval(code["args"])
    assert keywords(text, "FileSystemDataSource") and not keywords(text, "CheckpointConfig")
    assert ast.literal_eval(trainer["environment"])["FI_PROVIDER"] == "efa"
    assert "FI_PROVIDER" not in script(devices=4, nodes=2) + script(devices=8)


def test_a_number_of_gpus_that_no_instance_has_is_refused() -> None:
    with pytest.raises(UserError, match="3 GPUs"):
        script(devices=3)


class Aws:
    """AWS without a network: every call of boto3 is written down, and answered as for an account that has all."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def answer(self, client: Any, operation: str, parameters: dict[str, Any]) -> dict[str, Any]:
        if operation == "CreateTrainingJob":
            from botocore.validate import ParamValidator

            model = client.meta.service_model.operation_model(operation).input_shape  # AWS's own, published with boto
            wrong = ParamValidator().validate(parameters, model)
            assert not wrong.has_errors(), wrong.generate_report()
        body = parameters.get("Body")
        self.calls.append((operation, parameters | ({"Body": body.read()} if hasattr(body, "read") else {})))
        answers: dict[str, dict[str, Any]] = {
            "GetCallerIdentity": {"Account": "123456789012", "Arn": ROLE, "UserId": "X"},
            "GetRole": {"Role": {"Arn": ROLE, "RoleName": "trains", "AssumeRolePolicyDocument": TRUST}},
            "ListBuckets": {"Buckets": [{"Name": BUCKET, "CreationDate": datetime.now()}]},
            "SimulatePrincipalPolicy": {"EvaluationResults": []},
            "CreateTrainingJob": {"TrainingJobArn": "arn:aws:sagemaker:eu-west-1:123456789012:training-job/x"},
            "DescribeTrainingJob": {"TrainingJobName": "x", "TrainingJobStatus": "InProgress"},
        }
        return answers.get(operation, {})

    def requests(self, operation: str) -> list[dict[str, Any]]:
        return [parameters for name, parameters in self.calls if name == operation]


TRUST = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}],
}


@pytest.mark.campaign
@pytest.mark.skipif(find_spec("sagemaker") is None, reason="needs pip install 'fivefold[sagemaker]'")
def test_the_request_that_the_sdk_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    Path("notes.yaml").write_text("train: {max_steps: 5}\n")
    Path("runs").mkdir()
    Path("runs/large.bin").write_text("not for S3")
    request, files = sent(script(devices=8, minutes=90, overrides=("data.train=a b",)))
    assert request["AlgorithmSpecification"]["TrainingImage"] == IMAGE and request["RoleArn"] == ROLE
    assert request["ResourceConfig"] == {
        "InstanceType": "ml.p5.48xlarge", "InstanceCount": 1, "VolumeSizeInGB": 100
    }  # fmt: skip
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 5400}
    assert request["CheckpointConfig"] == {
        "S3Uri": f"s3://{BUCKET}/fivefold/notes-1", "LocalPath": "/opt/ml/checkpoints"
    }  # fmt: skip
    assert request["Environment"] == {"NCCL_DEBUG": "WARN"}
    assert {channel["ChannelName"] for channel in request["InputDataConfig"]} == {"code", "sm_drivers"}
    assert {"notes.yaml", "sm_train.sh"} <= files.keys() and "large.bin" not in files
    assert b"exec fivefold train notes.yaml 'data.train=a b' run.dir=/opt/ml/checkpoints\n" in files["sm_train.sh"]

    request, _ = sent(script(devices=8, nodes=2).replace("fs-ID", "fs-0123456789abcdef0"))
    channels = {channel["ChannelName"]: channel["DataSource"] for channel in request["InputDataConfig"]}
    assert channels["shared"]["FileSystemDataSource"]["FileSystemAccessMode"] == "rw"
    assert request["VpcConfig"] == {"Subnets": ["subnet-ID"], "SecurityGroupIds": ["sg-ID"]}
    assert request["ResourceConfig"]["InstanceCount"] == 2 and "CheckpointConfig" not in request
    assert request["Environment"]["FI_PROVIDER"] == "efa"


def sent(text: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Run the script. Returns its request for a job, and the files that it uploads, by name."""
    aws = Aws()
    Path("job.py").write_text(text)
    with (
        patch("botocore.client.BaseClient._make_api_call", lambda *call: aws.answer(*call)),
        patch("requests.get", side_effect=OSError("no network")),
    ):
        runpy.run_path("job.py")
    (request,) = aws.requests("CreateTrainingJob")
    return request, {Path(put["Key"]).name: put["Body"] for put in aws.requests("PutObject")}
