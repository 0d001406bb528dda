{{- define "deltapath.image" -}}
{{ with .root.Values.image.registry }}{{ . }}/{{ end }}{{ .name }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "deltapath.labels" -}}
app.kubernetes.io/name: deltapath
app.kubernetes.io/component: {{ . }}
{{- end }}

{{- define "deltapath.tolerations" -}}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "deltapath.env" -}}
- name: {{ .name }}
  valueFrom:
    fieldRef:
      fieldPath: {{ .path }}
{{- end }}

{{- /* Of each container but the driver's; pods with a profile of their own need none here. */}}
{{- define "deltapath.locked" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
  {{- if .profile }}
  seccompProfile:
    type: RuntimeDefault
  {{- end }}
{{- end }}

{{- define "deltapath.resources" -}}
resources:
  requests:
    cpu: {{ index . 0 }}
    memory: {{ index . 1 }}
  limits:
    memory: {{ index . 2 }}
{{- end }}

{{- /* Measured: sidecars use 44 to 60 MiB in a small cluster. */}}
{{- define "deltapath.small" -}}
{{- include "deltapath.resources" (list "5m" "64Mi" "256Mi") }}
{{- end }}

{{- define "deltapath.probe" -}}
livenessProbe:
  httpGet:
    path: /healthz
    port: {{ . }}
  initialDelaySeconds: 10
  timeoutSeconds: 5
{{- end }}

{{- /* A sidecar that needs the socket alone. In the controller's pods one of each kind works, which is elected. */}}
{{- define "deltapath.sidecar" -}}
- name: {{ .name }}
  image: {{ .root.Values.sidecarRegistry }}/{{ .name }}:{{ .version }}
  args:
    - --csi-address=/csi/csi.sock
    {{- if .elected }}
    - --leader-election
    {{- end }}
    {{- range .args }}
    - {{ . }}
    {{- end }}
    - --v=2
  {{- if eq .name "csi-provisioner" }}
  env:
    {{- include "deltapath.env" (dict "name" "NAMESPACE" "path" "metadata.namespace") | nindent 4 }}
    {{- include "deltapath.env" (dict "name" "POD_NAME" "path" "metadata.name") | nindent 4 }}
  {{- end }}
  {{- include "deltapath.locked" (dict "profile" (not .elected)) | nindent 2 }}
  {{- include "deltapath.small" . | nindent 2 }}
  volumeMounts:
    - name: socket-dir
      mountPath: /csi
{{- end }}

{{- /* The sidecars that are about the cluster: in the driver's pod, or in the controller's. */}}
{{- define "deltapath.controllerSidecars" -}}
{{- $elected := eq .Values.mode "distributed" }}
{{- $qps := list "--kube-api-qps=50" "--kube-api-burst=100" }}
{{- /* The owner of the storage capacities is the Deployment, not the ReplicaSet, which an update replaces. The default of one
capacity a second makes the first pods of a new StorageClass wait for its turn. */}}
{{- $capacity := list "--enable-capacity" (printf "--capacity-ownerref-level=%s" (ternary "2" "1" $elected)) "--kube-api-capacity-qps=50" "--kube-api-capacity-burst=100" }}
{{- $args := concat (list "--extra-create-metadata" "--strict-topology" "--immediate-topology=false") $capacity $qps (list "--timeout=60s") }}
{{ include "deltapath.sidecar" (dict "root" . "elected" $elected "name" "csi-provisioner" "version" "v6.4.0" "args" $args) }}
{{- /* Volumes grow while they are in use: no need to watch pods for the day they are not. */}}
{{- $args = concat (list "--handle-volume-inuse-error=false" "--resize-timeout=60s") $qps }}
{{ include "deltapath.sidecar" (dict "root" . "elected" $elected "name" "csi-resizer" "version" "v2.3.0" "args" $args) }}
{{- /* A filesystem may be frozen for 30 seconds; on a dir pool a snapshot takes as long as its data. */}}
{{- $args = concat (list "--extra-create-metadata" "--timeout=300s") $qps }}
{{ include "deltapath.sidecar" (dict "root" . "elected" $elected "name" "csi-snapshotter" "version" "v8.7.0" "args" $args) }}
{{- /* The API server keeps what it writes only with the feature gate CSIVolumeHealth. */}}
{{ include "deltapath.sidecar" (dict "root" . "elected" $elected "name" "csi-external-health-monitor-controller" "version" "v0.19.0" "args" (list "--list-volumes-interval=1m")) }}
{{- end }}

{{- define "deltapath.backupBounds" -}}
resources:
  requests:
    memory: 64Mi
  limits:
    memory: 512Mi
{{ include "deltapath.locked" dict }}
{{- end }}
