"""A chart and objects that are as small as they can be, for tests of the stand-in itself."""

from __future__ import annotations

import os
from pathlib import Path

# Of a container that does nothing until it is stopped; a real cluster has to be able to pull it.
IMAGE = os.environ.get("ISTHMUS_TEST_IMAGE", "pause:3.10")

DEPLOYMENT = f"""
apiVersion: apps/v1
kind: Deployment
metadata:
  name: web
spec:
  replicas: 2
  selector:
    matchLabels:
      app: web
  template:
    metadata:
      labels:
        app: web
    spec:
      containers:
      - name: main
        image: {IMAGE}
        ports:
        - containerPort: 80
"""

CRD = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: toys.example.dev
spec:
  group: example.dev
  scope: Namespaced
  names: {kind: Toy, listKind: ToyList, plural: toys, singular: toy, shortNames: [ty]}
  versions:
  - name: v1
    served: true
    storage: true
    subresources:
      status: {}
      scale: {specReplicasPath: .spec.size, statusReplicasPath: .status.size}
    additionalPrinterColumns:
    - {name: Size, type: integer, jsonPath: .spec.size}
    - {name: Ready, type: string, jsonPath: '.status.conditions[?(@.type=="Ready")].status'}
    schema:
      openAPIV3Schema:
        type: object
        required: [spec]
        properties:
          spec:
            type: object
            required: [colour]
            properties:
              colour: {type: string, enum: [red, green]}
              size: {type: integer, minimum: 0, default: 1}
              parts:
                type: array
                x-kubernetes-list-type: map
                x-kubernetes-list-map-keys: [name]
                items:
                  type: object
                  required: [name]
                  properties:
                    name: {type: string}
                    weight: {type: integer}
          status:
            type: object
            x-kubernetes-preserve-unknown-fields: true
"""

_TEMPLATE = """
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .Release.Name }}
spec:
  {{- if .Values.replicas }}
  replicas: {{ .Values.replicas }}
  {{- end }}
  selector:
    matchLabels:
      app: {{ .Release.Name }}
  template:
    metadata:
      labels:
        app: {{ .Release.Name }}
        text: {{ .Values.text | quote }}
    spec:
      containers:
      - name: main
        image: IMAGE
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ .Release.Name }}
data:
  text: {{ .Values.text | quote }}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ .Release.Name }}-before
  annotations:
    helm.sh/hook: pre-upgrade
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
spec:
  template:
    spec:
      restartPolicy: Never
      containers:
      - name: main
        image: IMAGE
---
apiVersion: v1
kind: Pod
metadata:
  name: {{ .Release.Name }}-test
  annotations:
    helm.sh/hook: test
spec:
  restartPolicy: Never
  containers:
  - name: main
    image: IMAGE
"""


def write_chart(folder: Path) -> Path:
    """Write a chart whose values are `replicas` and `text`."""
    chart = folder / "small"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("apiVersion: v2\nname: small\nversion: 0.1.0\n")
    (chart / "values.yaml").write_text("replicas: 2\ntext: first\n")
    (chart / "templates" / "all.yaml").write_text(_TEMPLATE.replace("IMAGE", IMAGE))
    return chart
