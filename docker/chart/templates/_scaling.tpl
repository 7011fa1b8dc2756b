{{/* Up at once, by half or by four pods; down slowly: a cold replica has no local signals. */}}
{{- define "ranker.scaling" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  selectPolicy: Max
  policies:
    - {type: Percent, value: 50, periodSeconds: 30}
    - {type: Pods, value: 4, periodSeconds: 30}
scaleDown:
  stabilizationWindowSeconds: {{ .Values.autoscaling.scaleDownWaitSeconds }}
  selectPolicy: Min
  policies:
    - {type: Percent, value: 10, periodSeconds: 60}
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end -}}
