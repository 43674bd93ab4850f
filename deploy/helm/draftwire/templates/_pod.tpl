{{/* A service's pods. */}}
{{- define "draftwire.pod" -}}
{{- $values := index .root.Values .name -}}
{{- $tokens := and (eq .name "verifier") .root.Values.tokens.secret -}}
metadata:
  labels:
    {{- include "draftwire.selector" . | nindent 4 }}
  {{- with $values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  # Before the drain the preStop hook, after it the end of the process.
  terminationGracePeriodSeconds: {{ add $values.drainTimeoutSeconds 15 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
    - topologyKey: {{ . }}
      maxSkew: 1
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "draftwire.selector" $ | nindent 10 }}
    {{- end }}
  containers:
    - name: {{ .name }}
      image: {{ printf "%s:%s" $values.image.repository ($values.image.tag | default .root.Chart.AppVersion) | quote }}
      imagePullPolicy: {{ .root.Values.imagePullPolicy }}
      args:
        {{- include (printf "draftwire.%sArgs" .name) .root | nindent 8 }}
        {{- with $values.args }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        - name: HF_HUB_OFFLINE
          value: "1"
        {{- range $name, $value := $values.env }}
        - name: {{ $name }}
          value: {{ $value | quote }}
        {{- end }}
      ports:
        - name: grpc
          containerPort: {{ include "draftwire.port" . }}
        {{- if .root.Values.metrics.enabled }}
        - name: metrics
          containerPort: 9090
        {{- end }}
      startupProbe:
        {{- include "draftwire.probe" . | nindent 8 }}
        periodSeconds: 10
        failureThreshold: {{ div $values.startupTimeoutSeconds 10 }}
      readinessProbe:
        {{- include "draftwire.probe" . | nindent 8 }}
        periodSeconds: 10
        failureThreshold: 2
      livenessProbe:
        {{- include "draftwire.probe" . | nindent 8 }}
        periodSeconds: 20
        failureThreshold: 6
      {{- if eq .name "verifier" }}
      lifecycle:
        preStop:
          # New requests go elsewhere before it stops to take them: the Service's endpoints follow with a delay.
          exec:
            command: [sleep, "5"]
      {{- end }}
      resources:
        {{- toYaml $values.resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        - name: models
          mountPath: /models
          readOnly: true
        {{- if .root.Values.tls.enabled }}
        - name: tls
          mountPath: /run/tls
          readOnly: true
        {{- if eq .name "verifier" }}
        - name: drafter-tls
          mountPath: /run/drafter-tls
          readOnly: true
        {{- end }}
        {{- end }}
        {{- if $tokens }}
        - name: tokens
          mountPath: /run/tokens
          readOnly: true
        {{- end }}
  volumes:
    - name: tmp
      emptyDir:
        sizeLimit: {{ $values.tmpSizeLimit }}
    - name: models
      {{- if .root.Values.models.hostPath }}
      hostPath:
        path: {{ .root.Values.models.hostPath }}
        type: Directory
      {{- else }}
      persistentVolumeClaim:
        claimName: {{ .root.Values.models.claim }}
        readOnly: true
      {{- end }}
    {{- if .root.Values.tls.enabled }}
    - name: tls
      secret:
        secretName: {{ index .root.Values.tls (printf "%sSecret" .name) }}
        defaultMode: 0440
    {{- if eq .name "verifier" }}
    - name: drafter-tls
      secret:
        secretName: {{ .root.Values.tls.drafterClientSecret }}
        defaultMode: 0440
    {{- end }}
    {{- end }}
    {{- if $tokens }}
    - name: tokens
      secret:
        secretName: {{ $tokens }}
        defaultMode: 0440
    {{- end }}
{{- end }}
