"""Makes schemas.json: the part of Kubernetes' published schemas that the printed manifests use.

    python tests/manifests/make_schemas.py JOBSET_CRD.yaml TRAINJOB_CRD.yaml SERVICE_SCHEMA.json

The files are those named under "origin". Of a schema stay the properties that some manifest sets or that are
required, without descriptions; whatever else a manifest sets is then an error, as it is under `kubectl
apply --validate=strict`. Rules in CEL (x-kubernetes-validations) are left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

KEPT = ("type", "enum", "format", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems")
ORIGIN = {
    "JobSet": "kubernetes-sigs/jobset v0.12.0 (Apache-2.0), "
    "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml",
    "TrainJob": "kubeflow/trainer v2.3.0 (Apache-2.0), "
    "manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml",
    "Service": "kubernetes v1.37.0 (Apache-2.0), as in the PyPI package kubernetes-validate 1.37.0, "
    "v1.37.0-local-strict/service-v1.json",
}


def prune(schema: dict[str, Any], used: Any) -> dict[str, Any]:
    """The part of a schema that concerns these values."""
    kept = {key: schema[key] for key in KEPT if key in schema}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if "properties" in schema:
        known, required = schema["properties"], schema.get("required", [])
        values = [value for value in used if isinstance(value, dict)]
        names = [name for name in known if name in required or any(name in value for value in values)]
        kept["properties"] = {
            name: prune(known[name], [value[name] for value in values if name in value]) for name in names
        }
        kept["additionalProperties"] = False
        if required:
            kept["required"] = required
    elif isinstance(schema.get("additionalProperties"), dict):
        inner = [each for value in used if isinstance(value, dict) for each in value.values()]
        kept["additionalProperties"] = prune(schema["additionalProperties"], inner)
    if "items" in schema:
        kept["items"] = prune(
            schema["items"], [each for value in used if isinstance(value, list) for each in value]
        )
    return kept


def resolve(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema without references. Nothing that we use refers to itself."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            return resolve(definitions[schema["$ref"].rpartition("/")[2]], definitions)
        return {key: resolve(value, definitions) for key, value in schema.items()}
    return [resolve(each, definitions) for each in schema] if isinstance(schema, list) else schema


def main() -> None:
    from test_manifests import EXAMPLES, documents

    crds = [yaml.safe_load(Path(path).read_text()) for path in sys.argv[1:3]]
    whole = {
        crd["spec"]["names"]["kind"]: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for crd in crds
    }
    service = Path(sys.argv[3])
    definitions = json.loads((service.parent / "_definitions.json").read_text())["$defs"]
    whole["Service"] = resolve(json.loads(service.read_text()), definitions)
    printed = [document for words in EXAMPLES for document in documents(*words)]
    schemas = {}
    for kind, schema in whole.items():
        used = [document for document in printed if document["kind"] == kind]
        schema["properties"]["metadata"] = {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        }
        schemas[kind] = prune(schema, used)
    text = json.dumps({"origin": ORIGIN, "schemas": schemas}, indent=1)
    Path(__file__).with_name("schemas.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
