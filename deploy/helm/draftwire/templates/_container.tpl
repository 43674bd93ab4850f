{{/* A service's container. */}}
{{- define "draftwire.container" -}}
{{- $values := index .root.Values .name -}}
{{- $ports := include "draftwire.ports" . | fromYaml -}}
{{- $env := dict "HF_HUB_OFFLINE" "1" "XDG_CACHE_HOME" "/var/cache/draftwire" "TRITON_CACHE_DIR" "/var/cache/draftwire/triton" -}}
{{- if .root.Values.rendezvous.hostPath -}}
{{- $_ := set $env "DRAFTWIRE_RENDEZVOUS_DIR" "/run/draftwire" -}}
{{- end -}}
name: {{ .name }}
image: {{ include "draftwire.image" . }}
imagePullPolicy: {{ .root.Values.imagePullPolicy }}
args:
  {{- include (printf "draftwire.%sArgs" .name) .root | nindent 2 }}
  {{- with $values.args }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
env:
  {{- include "draftwire.env" (merge (deepCopy $values.env) $env) | trim | nindent 2 }}
{{- with $values.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - name: {{ $ports.prefix }}grpc
    containerPort: {{ $ports.grpc }}
  - name: {{ $ports.prefix }}health
    containerPort: {{ $ports.health }}
  {{- if .root.Values.metrics.enabled }}
  - name: {{ $ports.prefix }}metrics
    containerPort: {{ $ports.metrics }}
  {{- end }}
{{- $probe := printf "grpc: {port: %v}" $ports.health }}
{{- if and (eq .name "drafter") .root.Values.drafter.colocated }}
# Without startup and readiness probes, because an unready drafter would exclude its verifier from the Service.
livenessProbe:
  {{ $probe }}
  initialDelaySeconds: {{ $values.startupTimeoutSeconds }}
{{- else }}
startupProbe:
  {{ $probe }}
  timeoutSeconds: 10
  periodSeconds: 10
  failureThreshold: {{ div $values.startupTimeoutSeconds 10 }}
readinessProbe:
  {{ $probe }}
  timeoutSeconds: 10
  periodSeconds: 10
  failureThreshold: 2
livenessProbe:
  {{ $probe }}
{{- end }}
  timeoutSeconds: 10
  periodSeconds: 20
  failureThreshold: 6
{{- if eq .name "verifier" }}
lifecycle:
  preStop:
    # The Service's endpoints change with a delay, so wait until new requests go to other pods.
    exec:
      command: [sleep, "5"]
{{- end }}
resources:
  {{- toYaml $values.resources | nindent 2 }}
securityContext:
  {{- include "draftwire.containerSecurity" . | nindent 2 }}
volumeMounts:
  - name: tmp
    mountPath: /tmp
  - name: compile-cache
    mountPath: /var/cache/draftwire
  - name: models
    mountPath: /models
    readOnly: true
  {{- if $values.shmSizeLimit }}
  - name: shm
    mountPath: /dev/shm
  {{- end }}
  {{- if .root.Values.rendezvous.hostPath }}
  - name: rendezvous
    mountPath: /run/draftwire
  {{- end }}
  {{- if .root.Values.tls.enabled }}
  - name: {{ .name }}-tls
    mountPath: /run/tls
    readOnly: true
  {{- if eq .name "verifier" }}
  - name: drafter-client-tls
    mountPath: /run/drafter-tls
    readOnly: true
  {{- end }}
  {{- end }}
  {{- if and (eq .name "verifier") .root.Values.tokens.secret }}
  - name: tokens
    mountPath: /run/tokens
    readOnly: true
  {{- end }}
  {{- with $values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Init containers that download the models of a pod; only they have the hub's token. */}}
{{- define "draftwire.downloads" -}}
{{- $models := .root.Values.models -}}
{{- $keys := list "target" -}}
{{- if or (eq .name "drafter") .root.Values.drafter.colocated }}{{ $keys = append $keys "head" }}{{ end -}}
{{- range $key := $keys }}
{{- $id := index $models $key }}
- name: download-{{ $key }}
  image: {{ include "draftwire.image" $ }}
  imagePullPolicy: {{ $.root.Values.imagePullPolicy }}
  command:
    - hf
    - download
    - {{ $id }}
    - --revision={{ index $models.download (printf "%sRevision" $key) }}
    - --local-dir=/models/{{ $id }}
    {{- range list "*.json" "*.safetensors" "*.bin" "*.model" "*.jinja" }}
    - --include={{ . }}
    {{- end }}
  env:
    {{- $env := dict "HF_HOME" "/models/.huggingface" }}
    {{- with $models.download.tokenSecret }}
    {{- $_ := set $env "HF_TOKEN" (dict "secretKeyRef" (dict "name" . "key" "token")) }}
    {{- end }}
    {{- include "draftwire.env" (merge (deepCopy $models.download.env) $env) | trim | nindent 4 }}
  {{- with $models.download.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "draftwire.containerSecurity" $ | nindent 4 }}
  volumeMounts:
    - name: tmp
      mountPath: /tmp
    - name: models
      mountPath: /models
{{- end }}
{{- end }}
